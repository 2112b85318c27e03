"""Whole engines on the Triton kernels, through the interpreter: tiny models give the tokens of
`transformers`, and draws those of torch's kernels.
"""

import pytest

from engine.runtime.steps import device_steps
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request
from tests.support.runner_kinds import use_kind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 4
LENGTHS = (7, 33)
FLAGS = {
    "block_size": 8,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 24,  # so that the longer prompt is chunked, beside a row that decodes
    "num_gpu_blocks_override": 32,
    "async_scheduling": True,
}


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch):
    """Skips the warm-up, which takes long here and is tested in test_compiled_before_serving.py."""
    monkeypatch.setattr(device_steps, "_warm_up_batches", lambda model: ())


def _tokens(variant, draws, **flags):
    """Returns the tokens of each prompt, drawn with the parameters at its position in `draws`."""
    core = build_core(tiny_checkpoint(variant), "both", **(FLAGS | flags))
    requests = [
        engine_request(
            request_id=str(length),
            prompt_token_ids=tuple(prompt_of(length, seed=length)),
            max_tokens=NUM_TOKENS,
            **draw,
        )
        for length, draw in zip(LENGTHS, draws, strict=True)
    ]
    outputs = run_all(core, requests)
    core.close()
    return [tokens_of(outputs[str(length)]) for length in LENGTHS]


def _reference(variant):
    path = tiny_checkpoint(variant)
    return [
        reference_greedy(path, prompt_of(length, seed=length), NUM_TOKENS) for length in LENGTHS
    ]


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("qwen3", "triton, eager"),
        ("llama_sharded", "triton, eager"),  # heads whose width is no power of two
        ("qwen2_alternating", "triton, graphs"),
        ("gpt2", "triton, eager"),
        ("deepseek_v3", "triton, graphs"),
    ],
)
def test_tokens_are_those_of_transformers(variant, kind, monkeypatch):
    use_kind(kind, monkeypatch)
    assert _tokens(variant, ({}, {})) == _reference(variant)


def test_half_precision_draws_the_first_token_of_float32(monkeypatch):
    use_kind("triton, eager", monkeypatch)
    drawn = _tokens("llama", ({}, {}), dtype="bfloat16")
    assert [tokens[0] for tokens in drawn] == [tokens[0] for tokens in _reference("llama")]


def test_draws_are_those_of_torch(monkeypatch):
    draws = (
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 2**63 + 1},
        {"temperature": 1.5, "seed": 7},
    )
    drawn = []
    for kind in ("device, eager", "triton, graphs"):
        with monkeypatch.context() as patched:
            use_kind(kind, patched)
            drawn.append(_tokens("llama", draws))
    assert drawn[0] == drawn[1]


def test_an_8_bit_cache_gives_the_tokens_of_torch(monkeypatch):
    drawn = []
    for kind in ("device, eager", "triton, graphs"):
        with monkeypatch.context() as patched:
            use_kind(kind, patched)
            drawn.append(_tokens("llama", ({}, {}), kv_cache_dtype="fp8_e4m3"))
    assert drawn[0] == drawn[1]
