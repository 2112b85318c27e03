"""States of recurrent layers that several ranks share: the tokens of one rank and of
`transformers`, whether requests are preempted, forked, or begin at states that others have left.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from engine.loop.core import EngineCore
from kernels.library.commands import library
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.kv_urls import fresh_shm_name, kv_urls
from tests.support.logprob_checks import check_tokens
from tests.support.rank_engines import check_greedy, check_handed_over, tiers, tokens
from tests.support.real_engines import engine, run_all, tokens_of
from tests.support.requests import engine_request

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no native kernels"),
    pytest.mark.timeout(180),
]

BLOCK = 8
NUM_TOKENS = 9
PROMPT, OTHER = (tuple(prompt_of(70, seed=seed)) for seed in (1, 2))
OVERLAPPED: dict[str, object] = {"async_scheduling": True}
# Most of these draft tokens are refused.
DRAFTS: dict[str, object] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
    }
}
CASES = [
    ("lfm2_biased", 2, 1, OVERLAPPED),
    ("lfm2_six_heads", 3, 1, {}),
    ("qwen3_5", 2, 1, DRAFTS),
    ("qwen3_next_six_heads", 3, 1, OVERLAPPED),  # and five experts
    ("qwen3_5_moe", 2, 1, {}),
    ("lfm2_biased_four_layers", 1, 2, {}),
    ("qwen3_5_four_layers", 1, 2, {**DRAFTS, **OVERLAPPED}),
    ("qwen3_next_four_layers", 2, 2, OVERLAPPED),
]


def sizes(width: int, num_stages: int) -> dict[str, object]:
    return {"tensor_parallel_size": width, "pipeline_parallel_size": num_stages}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("variant", "width", "num_stages", "flags"), CASES)
def test_tokens_are_those_of_one_rank_and_of_transformers(
    variant: str, width: int, num_stages: int, flags: dict[str, object]
) -> None:
    found = tokens(variant, block_size=BLOCK, **sizes(width, num_stages), **flags)
    assert found == tokens(variant, block_size=BLOCK)
    check_greedy(variant, found)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("width", "num_stages", "flags"),
    [
        (2, 1, {"preemption_mode": "swap", "swap_space": 1 << 20, **OVERLAPPED}),
        (2, 1, {"preemption_mode": "recompute", "num_state_slots": 3}),
        (1, 2, {"preemption_mode": "swap", "swap_space": 1 << 20, **OVERLAPPED}),
        (2, 2, {"preemption_mode": "recompute", "kv_cache_dtype": "fp8_e4m3", **OVERLAPPED}),
    ],
    ids=["swap", "recompute, few slots", "swap, stages", "8 bits"],
)
def test_preempted_requests_have_the_tokens_of_one_rank(
    width: int, num_stages: int, flags: dict[str, object]
) -> None:
    small = {"block_size": BLOCK, "num_gpu_blocks_override": 24, "max_model_len": 96, **flags}
    found = tokens("qwen3_next_four_layers", **sizes(width, num_stages), **small)
    assert found == tokens("qwen3_next_four_layers", **small)


@pytest.mark.parametrize(
    ("variant", "width", "num_stages"),
    [("qwen3_next_four_layers", 2, 1), ("lfm2_biased_four_layers", 1, 2)],
)
def test_prompts_begin_at_states_that_others_have_left(
    variant: str, width: int, num_stages: int
) -> None:
    flags = {"block_size": BLOCK, "state_interval": 2 * BLOCK, "max_num_batched_tokens": 24}
    with engine(variant, **flags, **sizes(width, num_stages)) as core:
        check_logprobs(core, variant, PROMPT)
        for place, num_cached in ((63, 0), (64, 64), (69, 64)):
            prompt = PROMPT[:place] + OTHER[place:]
            assert check_logprobs(core, variant, prompt) == num_cached
        assert core._runner._steps._recorded._recordings


def check_logprobs(core: EngineCore, variant: str, prompt: tuple[int, ...]) -> int:
    """Runs a prompt, and checks tokens and log-probabilities against `transformers`; returns how
    many of its tokens were cached.
    """
    path = tiny_checkpoint(variant)
    request = engine_request("r", prompt, max_tokens=NUM_TOKENS, logprobs=2)
    outputs = run_all(core, [request])["r"]
    drawn = tokens_of(outputs)
    assert drawn == reference_greedy(path, prompt, NUM_TOKENS)
    details = [detail for output in outputs for detail in output.logprobs]
    check_tokens(path, [*prompt, *drawn], details, num_top=2)
    return outputs[0].cached_tokens


TIERS = [
    # Ranks per stage and stages of prefill, then of decode.
    ("qwen3_next_four_layers", (2, 1, 1, 2), "shm", OVERLAPPED),
    ("lfm2_biased_four_layers", (1, 1, 2, 1), "grpc", {}),
    ("lfm2_biased_four_layers", (1, 2, 2, 2), "nixl", OVERLAPPED),
    ("qwen3_next_six_heads", (3, 1, 1, 1), "redis", {}),
    ("qwen3_5_four_layers", (2, 2, 1, 1), "redis", {"kv_transfer_block_size": 4}),
]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("variant", "ranks", "scheme", "flags"), TIERS)
def test_tiers_of_any_numbers_of_ranks_hand_over(
    variant: str,
    ranks: tuple[int, int, int, int],
    scheme: str,
    flags: dict[str, object],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Nothing is recomputed: decode loads KV and states, each rank its heads and layers."""
    path = tiny_checkpoint(variant)
    width, stages, decode_width, decode_stages = ranks
    common = {
        "block_size": BLOCK,
        "kv_transfer_head_slices": max(width, decode_width),
        "kv_transfer_layer_slices": max(stages, decode_stages),
        **flags,
    }
    redis_url = request.getfixturevalue("redis_server").url if scheme == "redis" else ""
    with ExitStack() as opened:
        shm_name = opened.enter_context(fresh_shm_name())
        common["kv_connector"] = kv_urls(tmp_path, shm_name, redis_url, timeout_s=20)[scheme]
        tier_sizes = sizes(width, stages), sizes(decode_width, decode_stages)
        check_handed_over(path, opened.enter_context(tiers(path, *tier_sizes, **common)))


@pytest.mark.usefixtures("loads_are_worth_it")
def test_prompts_begin_at_states_that_other_numbers_of_ranks_have_saved(tmp_path: Path) -> None:
    flags = {
        "kv_connector": f"file://{tmp_path}/kv",
        "kv_load_failure_policy": "fail",
        "kv_transfer_head_slices": 2,
        "kv_transfer_layer_slices": 2,
    }
    for width, num_stages, num_cached in ((2, 1, 0), (1, 2, 64), (1, 1, 64)):
        with engine("qwen3_5_four_layers", **flags, **sizes(width, num_stages)) as core:
            assert check_logprobs(core, "qwen3_5_four_layers", PROMPT) == num_cached


@pytest.mark.parametrize(
    ("variant", "flags", "message"),
    [
        ("lfm2", sizes(4, 1), "--tensor-parallel-size is 4; it must divide the 2 KV heads of a"),
        ("qwen3_next", sizes(2, 1), "it must divide the 3 'query' heads of states of a model"),
        (
            "lfm2_biased",
            sizes(1, 2),
            "--pipeline-parallel-size is 2; its stages need equally many layers .* and 1 recurrent",
        ),
        (
            "lfm2_biased",
            {**sizes(2, 1), "kv_connector": "shm://", "kv_transfer_head_slices": 1},
            "--kv-transfer-head-slices is 1; it must be a multiple of the 2 ranks",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    variant: str, flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message), engine(variant, **flags):
        pass
