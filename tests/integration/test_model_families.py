"""Every model family with the paged cache, compared with `transformers` on one checkpoint.

The cache starts full of NaN and its blocks are shuffled, so a token that reads
a wrong slot, or misses one, changes the result.
"""

from functools import cache
from itertools import product

import pytest
import torch

from engine.runtime.weights.loader import load_model
from tests.support.checkpoints import (
    DECODER_VARIANTS,
    HYBRIDS,
    MAX_MODEL_LEN,
    SLIDING_WINDOW,
    VARIANTS,
    VOCAB_SIZE,
    prompt_of,
    reference_greedy,
    reference_model,
    tiny_checkpoint,
)
from tests.support.expert_variants import EXPERT_VARIANTS, LATENT_VARIANTS
from tests.support.paged_session import PagedSession, loaded

# Logits have a spread of about 1.5; float32 rounds each of some hundred operations.
pytestmark = pytest.mark.sampled(one_in=2)

TOLERANCE = {"atol": 5e-5, "rtol": 0}
# A state of few tokens maps a query to almost nothing, which is then normalized: the two ways of
# transformers to compute a prompt differ by nearly as much.
DELTA = ("qwen3_5", "qwen3_next")
DELTA_TOLERANCE = {"atol": 2e-4, "rtol": 0}

# Steps: lists of (sequence, query length) in order.
SCHEDULES = {
    "whole prompts": [[(0, 43), (1, 8), (2, 1)]],
    "one at a time": [[(1, 8)], [(0, 43)], [(2, 1)]],
    "chunks": [[(0, 5), (1, 7)], [(0, 16), (1, 1)], [(0, 1), (2, 1)], [(0, 21)]],
    "token by token": [
        *([(0, 1), (1, 1)] for _ in range(8)),
        [(2, 1), (0, 1)],
        *([(0, 1)] for _ in range(34)),
    ],
    "decode beside prefill": [
        [(1, 5)],
        [(1, 1), (0, 20)],
        [(0, 3), (1, 1), (2, 1)],
        [(1, 1), (0, 20)],
    ],
}
LENGTHS = (43, 8, 1)


@cache
def reference_logits(variant: str, seed: int, length: int) -> torch.Tensor:
    with torch.inference_mode():
        model = reference_model(tiny_checkpoint(variant))
        return model(torch.tensor([prompt_of(length, seed)])).logits[0]


@pytest.mark.parametrize(
    ("variant", "schedule"),
    [
        *product([*VARIANTS, *HYBRIDS, *LATENT_VARIANTS], SCHEDULES),
        *product([*DECODER_VARIANTS, *EXPERT_VARIANTS], ["chunks", "decode beside prefill"]),
    ],
)
def test_logits_match_transformers(variant, schedule):
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    session = PagedSession(loaded(variant), LENGTHS)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in SCHEDULES[schedule]:
        work = []
        for sequence, length in step:
            start = session.done[sequence]
            work.append((sequence, prompts[sequence][start : start + length]))
        for (sequence, _), logits in zip(work, session.step(work), strict=True):
            rows[sequence].append(logits)
    for seed, length in enumerate(LENGTHS):
        logits = torch.cat(rows[seed])
        assert logits.dtype == torch.float32
        tolerance = DELTA_TOLERANCE if variant.startswith(DELTA) else TOLERANCE
        torch.testing.assert_close(logits, reference_logits(variant, seed, length), **tolerance)


@pytest.mark.parametrize(
    "variant", [*VARIANTS, *DECODER_VARIANTS, *EXPERT_VARIANTS, *HYBRIDS, *LATENT_VARIANTS]
)
def test_greedy_tokens_match_transformers(variant):
    prompts = [prompt_of(length, seed=5) for length in (1, 7, 8, 9, 43)]
    num_tokens = 12
    session = PagedSession(loaded(variant), [len(prompt) + num_tokens for prompt in prompts])
    drawn: list[list[int]] = [[] for _ in prompts]
    work: list[tuple[int, list[int]]] = list(enumerate(prompts))
    for _ in range(num_tokens):
        for sequence, logits in enumerate(session.step(work)):
            drawn[sequence].append(int(logits[-1].argmax()))
        work = [(sequence, tokens[-1:]) for sequence, tokens in enumerate(drawn)]
    path = tiny_checkpoint(variant)
    assert drawn == [reference_greedy(path, prompt, num_tokens) for prompt in prompts]


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *product(["llama", "qwen3", "opt", "gpt2", "lfm2", "qwen3_5"], ["bfloat16", "float16"]),
        *product(["ernie4_5", "gemma2", "granite", "olmo3", "phi3_partial"], ["bfloat16"]),
    ],
)
def test_half_precision_errors_are_at_most_little_above_those_of_transformers(variant, dtype):
    prompt = prompt_of(43)
    session = PagedSession(loaded(variant, dtype), (43,))
    logits = torch.cat([*session.step([(0, prompt[:30])]), *session.step([(0, prompt[30:])])])
    with torch.inference_mode():
        narrow = reference_model(tiny_checkpoint(variant), getattr(torch, dtype))
        theirs = narrow(torch.tensor([prompt])).logits[0].float()
    exact = reference_logits(variant, 0, 43)
    error, their_error = (logits - exact).abs(), (theirs - exact).abs()
    assert 0 < error.mean() < 1.3 * their_error.mean()
    assert error.max() < 2 * their_error.max()


def test_a_sliding_window_changes_the_logits():
    """If it did not, the variants with windows would test nothing."""
    prompt = prompt_of(3 * SLIDING_WINDOW)  # longer than the reach of three layers
    changed = [prompt[0] ^ 1, *prompt[1:]]
    for variant, differs in (
        ("mistral", True),
        ("mistral_sliding", False),
        ("qwen2_sliding", True),
    ):
        session = PagedSession(loaded(variant), [len(prompt)] * 2)
        first, second = session.step([(0, prompt), (1, changed)])
        assert (not torch.equal(first[-1], second[-1])) is differs


@pytest.mark.parametrize("variant", ["llama_rope_llama3", "opt", "gpt2"])
def test_logits_at_the_models_last_position_match_transformers(variant):
    length = MAX_MODEL_LEN
    session = PagedSession(loaded(variant), [length])
    prompt = prompt_of(length)
    session.step([(0, prompt[:-1])])
    (last,) = session.step([(0, prompt[-1:])])
    with torch.inference_mode():
        model = reference_model(tiny_checkpoint(variant))
        expected = model(torch.tensor([prompt]), logits_to_keep=1).logits[0]
    torch.testing.assert_close(last, expected, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loaded_model_has_the_properties_of_its_config(variant):
    model = loaded(variant)
    config = reference_model(tiny_checkpoint(variant)).config
    assert model.vocab_size == VOCAB_SIZE
    assert model.max_model_len == MAX_MODEL_LEN
    assert len(model.sliding_windows) == config.num_hidden_layers
    assert model.num_kv_heads == getattr(config, "num_key_value_heads", 4)
    assert not any(parameter.requires_grad for parameter in model.model.parameters())


@pytest.mark.parametrize("variant", ["gemma2", "granite"])
def test_factors_on_embeddings_are_rounded_as_in_transformers(variant):
    token_ids = torch.arange(VOCAB_SIZE)
    model = reference_model(tiny_checkpoint(variant), torch.bfloat16)
    with torch.inference_mode():
        expected = model.model.embed_tokens(token_ids)
        if variant == "granite":
            expected = expected * model.config.embedding_multiplier
    embedded = loaded(variant, "bfloat16").model.embed_tokens(token_ids)
    assert torch.equal(embedded, expected)


@pytest.mark.parametrize(("max_model_len", "length"), [(64, 60), (None, 100)])
def test_longrope_has_the_factors_of_transformers_for_one_length(max_model_len, length):
    """transformers chooses by the length of each forward pass, so it has one for all tokens."""
    path = tiny_checkpoint("phi3_longrope")
    model = load_model(str(path), "auto", "cpu", progress=False, max_model_len=max_model_len)
    session = PagedSession(model, [length])
    prompt = prompt_of(length)
    logits = [session.step([(0, prompt[start : start + 17])])[0] for start in range(0, length, 17)]
    with torch.inference_mode():
        expected = reference_model(path)(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(torch.cat(logits), expected, **TOLERANCE)


def test_kv_of_longrope_is_shared_only_by_models_with_equal_factors():
    path = str(tiny_checkpoint("phi3_longrope"))
    fingerprints = [
        load_model(path, "auto", "cpu", progress=False, max_model_len=length).fingerprint
        for length in (32, 64, 65, None)
    ]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2] == fingerprints[3]
