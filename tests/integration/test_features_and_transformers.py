"""Features of memory and scheduling never change a token: real models, greedy, float32,
compared with `transformers`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product

import pytest

from engine.loop.core import EngineCore
from engine.request import EngineRequest
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.engine_work import has_work
from tests.support.later_families import HYBRID_FAMILIES, LATER_FAMILIES
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request

NUM_TOKENS = 40
LENGTHS = (1, 7, 16, 33, 50)
TIGHT = {"max_model_len": 92}  # with one block more than one such request needs
SWAP = {"preemption_mode": "swap", "swap_space": 2**26}
FEATURES = {
    "plain": {"enable_prefix_caching": False, "max_num_batched_tokens": 512},
    "prefix caching": {"max_num_batched_tokens": 512},
    "chunks": {"max_num_batched_tokens": 9},
    "long prompts": {"long_prefill_token_threshold": 5, "max_num_partial_prefills": 3},
    "recompute": {"preemption_mode": "recompute", **TIGHT},
    "swap": {**SWAP, **TIGHT},
    "overlap": {"async_scheduling": True},
    "overlap, recompute": {"async_scheduling": True, "preemption_mode": "recompute", **TIGHT},
    "overlap, swap": {"async_scheduling": True, **SWAP, **TIGHT},
    "alone": {"max_num_seqs": 1},
}
_PREEMPTING = [feature for feature, flags in FEATURES.items() if "preemption_mode" in flags]
_OTHERS = [feature for feature in FEATURES if feature not in _PREEMPTING]
# One family for each kind of KV and state takes all features. The others are swapped and
# recomputed, in one loop and the other; those of older tests take two more features, in turn.
_WHOLE = ("llama", "qwen2_alternating", "lfm2", "deepseek_v2")
_OLDER = (
    "gpt2",
    "lfm2_conv_last",
    "mistral_sliding",
    "qwen3_5",
    "qwen3_mostly_sliding",
    "qwen3_next",
)
_LATER = sorted({*LATER_FAMILIES} - {*HYBRID_FAMILIES, *_WHOLE})
CASES = [
    *product(_WHOLE, FEATURES),
    *(
        (variant, _PREEMPTING[place])
        for index, variant in enumerate((*_OLDER, *_LATER))
        for place in (index % 2, 3 - index % 2)
    ),
    *(
        (variant, _OTHERS[place % len(_OTHERS)])
        for index, variant in enumerate((*_OLDER, "gemma4"))
        for place in (2 * index, 2 * index + 1)
    ),
]


@contextmanager
def _engine(variant: str, flags: dict[str, object]) -> Iterator[EngineCore]:
    core = build_core(
        tiny_checkpoint(variant),
        "both",
        **{"block_size": 8, "num_gpu_blocks_override": 160, **flags},
    )
    try:
        yield core
    finally:
        core.close()


@cache
def _reference(variant: str, length: int) -> list[int]:
    prompt = prompt_of(length, seed=length % 2)
    return reference_greedy(tiny_checkpoint(variant), prompt, NUM_TOKENS)


def _requests() -> list[EngineRequest]:
    """Returns requests, some of whose prompts share a prefix."""
    return [
        engine_request(
            request_id=str(length),
            prompt_token_ids=tuple(prompt_of(length, seed=length % 2)),
            max_tokens=NUM_TOKENS,
        )
        for length in LENGTHS
    ]


def _flags_for(variant: str, feature: str) -> dict[str, object]:
    flags = FEATURES[feature]
    if "max_model_len" not in flags:
        return flags
    with _engine(variant, flags) as core:
        spec = core.scheduler.kv.spec
    return {**flags, "num_gpu_blocks_override": spec.blocks_for(92) + 1}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("variant", "feature"), CASES)
def test_features_change_no_token(variant: str, feature: str) -> None:
    with _engine(variant, _flags_for(variant, feature)) as core:
        for _ in range(2):  # the second run uses the prefix cache, if it is on
            outputs = run_all(core, _requests())
            for length in LENGTHS:
                assert tokens_of(outputs[str(length)]) == _reference(variant, length)
        if "recompute" in feature or "swap" in feature:
            assert core.scheduler.load().num_preemptions > 0


def test_preemption_by_swapping_copies_blocks_to_the_host() -> None:
    with _engine("llama", _flags_for("llama", "swap")) as core:
        num_swapped = 0
        for request in _requests():
            core.scheduler.add(request)
        while has_work(core):
            core.run_step([].extend)
            num_swapped = max(num_swapped, core.scheduler.load().num_swapped_blocks)
        assert num_swapped > 0


@pytest.mark.parametrize("variant", ["mistral_sliding", "qwen3_mostly_sliding"])
def test_blocks_outside_of_windows_are_released_and_prefixes_still_hit(variant: str) -> None:
    """One long request at a time, in a pool that could not hold its KV without windows."""
    num_prompt, num_tokens = 120, 100
    prompt = prompt_of(num_prompt)
    with _engine(variant, {"enable_prefix_caching": False}) as whole:
        num_layer_groups = len(whole.info.windows)
        num_full = -(-(num_prompt + num_tokens) // 8) * num_layer_groups
    num_blocks = num_full * 3 // 4
    flags = {"num_gpu_blocks_override": num_blocks, "max_model_len": 224}
    with _engine(variant, flags) as core:
        for turn in range(2):
            request = engine_request(
                request_id="long",
                prompt_token_ids=tuple(prompt),
                max_tokens=num_tokens,
            )
            outputs = run_all(core, [request])["long"]
            expected = reference_greedy(tiny_checkpoint(variant), prompt, num_tokens)
            assert tokens_of(outputs) == expected
            if turn:
                assert outputs[0].cached_tokens > 0


def test_the_next_turn_finds_the_kv_of_generated_tokens() -> None:
    with _engine("llama", {}) as core:
        prompt = prompt_of(20)
        first = engine_request(request_id="1", prompt_token_ids=tuple(prompt), max_tokens=30)
        answer = tokens_of(run_all(core, [first])["1"])
        question = prompt_of(10, seed=5)
        prompt = [*prompt, *answer, *question]
        second = engine_request(request_id="2", prompt_token_ids=tuple(prompt), max_tokens=8)

        outputs = run_all(core, [second])["2"]

        assert outputs[0].cached_tokens == (20 + 30 - 1) // 8 * 8
        assert tokens_of(outputs) == reference_greedy(tiny_checkpoint("llama"), prompt, 8)
