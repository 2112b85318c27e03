"""Engines that draft tokens: the tokens of engines that do not, for real models.

Most draft tokens come from an oracle, which knows the tokens and is wrong now and then, so that
rows of every length are accepted and rejected.
"""

from collections.abc import Sequence
from contextlib import closing
from itertools import product

import numpy as np
import pytest

from engine.loop.core import EngineCore
from engine.speculation import drafts
from engine.speculation.lookup import Proposer
from kernels.library.commands import library
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.later_families import HYBRID_FAMILIES, LATER_FAMILIES
from tests.support.rank_engines import all_kinds, check_handed_over, tiers, tokens
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request
from tests.support.runner_kinds import use_kind

VARIANTS = (
    *("llama", "gpt2", "opt", "mistral_sliding", "qwen2_alternating", "qwen3_mostly_sliding"),
    *("olmo3", "lfm2", "deepseek_v2", "glm4_moe_lite"),
)
MODES = ("recompute", "swap")
# Later families in turn; those at odd places have a draft model in `test_draft_model`.
LATER_CASES = [
    (variant, index % 4 > 1)
    for index, variant in enumerate(LATER_FAMILIES)
    if index % 2 == 0 and variant not in VARIANTS
]
DRAFTING = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "max_num_batched_tokens": 48,  # room for the draft tokens of all sequences
    "num_gpu_blocks_override": 160,
}


@pytest.fixture(autouse=True)
def _any_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts as many tokens as allowed: what they cost is not known without measured steps."""
    monkeypatch.setattr(drafts.Drafts, "committed", lambda *_: None)


class Oracle(Proposer):
    """Drafts texts that it knows; every fifth draft token is wrong.

    Args:
        texts: the sequences.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(text) for text in texts]
        self._num_drafts = 0

    def propose(self, tokens: np.ndarray, limit: int, *, is_private: bool) -> list[int]:
        known = tokens.tolist()
        draft_tokens = next(
            (text[len(known) :] for text in self._texts if text[: len(known)] == known), []
        )[:limit]
        for index in range(len(draft_tokens)):
            self._num_drafts += 1
            if self._num_drafts % 5 == 0:
                draft_tokens[index] = (draft_tokens[index] + 1) % 250
        return draft_tokens


def _draft(monkeypatch: pytest.MonkeyPatch, found: dict[tuple[str, int], list[int]]) -> None:
    """Makes engines draft the tokens that were drawn without draft tokens."""
    prompts = {each.spec.request_id: each.spec.prompt_token_ids for each in all_kinds()}
    oracle = Oracle([(*prompts[name], *text) for (name, _), text in found.items()])
    monkeypatch.setattr(drafts, "make_proposer", lambda _: oracle)


def _num_drafts(core: EngineCore) -> tuple[float, float]:
    values = core.metrics.snapshot().values
    return tuple(values["baton_engine_draft_tokens", each] for each in ("accepted", "rejected"))


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(
    ("variant", "overlapped"), [*product(VARIANTS, (False, True)), *LATER_CASES]
)
def test_draft_tokens_change_no_token(
    variant: str, overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tokens(variant, block_size=8)
    _draft(monkeypatch, plain)

    flags = {**DRAFTING, "async_scheduling": overlapped, "block_size": 8}
    with closing(build_core(tiny_checkpoint(variant), "both", **flags)) as core:
        for _ in range(2):  # the second time prompts are found in the prefix cache
            outputs = run_all(core, all_kinds())
            assert {key: tokens_of(outputs[key[0]], key[1]) for key in plain} == plain
        accepted, rejected = _num_drafts(core)

    assert accepted > 40
    assert rejected > 10


@pytest.mark.parametrize(
    "kind",
    [
        "device, eager",
        pytest.param("device, graphs", marks=pytest.mark.slow),
    ],
)
def test_draft_tokens_change_no_token_on_a_device(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tokens("llama")
    _draft(monkeypatch, plain)
    use_kind(kind, monkeypatch)

    assert tokens("llama", **DRAFTING) == plain
    assert tokens("llama", **DRAFTING, async_scheduling=True) == plain


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("variant", "mode", "overlapped"),
    [
        *product(["llama"], MODES, [False]),
        *((variant, MODES[i % 2], i % 4 > 1) for i, variant in enumerate(HYBRID_FAMILIES)),
    ],
)
def test_preempted_sequences_keep_drafting(
    variant: str, mode: str, overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lengths = tiny_checkpoint(variant), (7, 16, 33, 50)
    prompts = [prompt_of(length) for length in lengths]
    expected = [reference_greedy(path, prompt, 40) for prompt in prompts]
    oracle = Oracle([(*a, *b) for a, b in zip(prompts, expected, strict=True)])
    monkeypatch.setattr(drafts, "make_proposer", lambda _: oracle)
    flags = DRAFTING | {"max_model_len": 96, "block_size": 8, "async_scheduling": overlapped}
    with closing(build_core(path, "both", **flags)) as core:
        flags["num_gpu_blocks_override"] = core.scheduler.kv.spec.blocks_for(96) + 2
    swap = {"preemption_mode": mode, "swap_space": 2**26}
    with closing(build_core(path, "both", **flags, **swap)) as core:
        requests = [
            engine_request(str(length), tuple(prompt), max_tokens=40)
            for length, prompt in zip(lengths, prompts, strict=True)
        ]
        outputs = run_all(core, requests)
        assert [tokens_of(outputs[str(length)]) for length in lengths] == expected
        assert core.scheduler.load().num_preemptions > 0
        assert _num_drafts(core)[0] > 30


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_texts_that_repeat_themselves_are_drafted(method: str) -> None:
    """A tiny model's greedy text ends in a loop, which a look-up finds."""
    prompt = prompt_of(12)
    expected = reference_greedy(tiny_checkpoint("llama"), prompt, 120)
    flags = {"speculative_config": {"method": method, "prompt_lookup_min": 1}}
    with closing(build_core(tiny_checkpoint("llama"), "both", **flags)) as core:
        for turn in range(2):
            request = engine_request(str(turn), tuple(prompt), max_tokens=120)
            assert tokens_of(run_all(core, [request])[str(turn)]) == expected
        accepted, _ = _num_drafts(core)
    assert accepted > 0


def _nearly(tokens: Sequence[int], place: int) -> tuple[int, ...]:
    """Returns the tokens with another one at a place."""
    return (*tokens[:place], (tokens[place] + 1) % 250, *tokens[place + 1 :])


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_prediction_is_drafted(method: str, salt: str) -> None:
    """Draft tokens follow it from the answer's second token on, and again after a wrong token."""
    path, prompt = tiny_checkpoint("llama"), prompt_of(12)
    expected = reference_greedy(path, prompt, 40)
    flags = DRAFTING | {"speculative_config": {"method": method}}
    num_accepted = []
    for prediction in ((), _nearly(expected, 0), _nearly(expected, 15)):
        request = engine_request(
            "r",
            tuple(prompt),
            max_tokens=40,
            cache_salt=salt,
            prediction_token_ids=prediction,
        )
        with closing(build_core(path, "both", **flags)) as core:
            assert tokens_of(run_all(core, [request])["r"]) == expected
            num_accepted.append(_num_drafts(core)[0])
    none, wrong_first, wrong_later = num_accepted
    assert wrong_first > none + 10
    assert wrong_later > none + 10


def test_a_decode_tier_drafts_a_prediction() -> None:
    path, prompt = tiny_checkpoint("llama"), tuple(prompt_of(12))
    expected = reference_greedy(path, prompt, 10)
    no_look_ups = {"prompt_lookup_min": 64, "prompt_lookup_max": 64}
    flags = DRAFTING | {"speculative_config": {"method": "ngram", **no_look_ups}}
    with tiers(path, {}, flags, kv_connector="memory://predictions") as split:
        request = engine_request(
            "r", prompt, max_tokens=10, prediction_token_ids=_nearly(expected, 8)
        )
        split.run([request])
        (handed,) = split.handed.values()
        found = [*handed.progress[0].output_token_ids, *tokens_of(split.outputs["r"])]
        assert found == expected
        assert _num_drafts(split._decode) == (6, 1)  # rows of five and of two


def test_a_decode_tier_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint("llama")
    prompts = [prompt_of(length, seed=length) for length in (1, 8, 9, 31, 43)]
    oracle = Oracle([(*p, *reference_greedy(path, p, 10)) for p in prompts])
    monkeypatch.setattr(drafts, "make_proposer", lambda _: oracle)
    with tiers(path, DRAFTING, DRAFTING, kv_connector="memory://drafts") as split:
        check_handed_over(path, split)
        assert _num_drafts(split._decode)[0] > 15


@pytest.mark.skipif(library() is None, reason="no native kernels")
@pytest.mark.parametrize(
    "ranks",
    [
        {"tensor_parallel_size": 2},
        pytest.param(
            {"pipeline_parallel_size": 3, "async_scheduling": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_draft_tokens(ranks: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tokens("llama")
    _draft(monkeypatch, plain)

    assert tokens("llama", **DRAFTING, **ranks) == plain
