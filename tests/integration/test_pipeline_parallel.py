"""One model in several stages: the tokens of one rank, and the end of a pipeline."""

import os
import signal
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from engine.batch import ScheduledBatch
from engine.loop.core import EngineCore
from engine.runner import StepCosts
from engine.step_watch import SLOW_FACTOR
from kernels.library.commands import library
from kernels.ranks import RanksLostError
from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.kv_urls import fresh_shm_name, kv_urls
from tests.support.rank_engines import (
    all_kinds,
    check_greedy,
    check_handed_over,
    is_running,
    pids_of,
    tiers,
    tokens,
    wait_until_ended,
)
from tests.support.real_engines import build_core, run_all
from tests.support.requests import engine_request

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no native kernels"),
    pytest.mark.timeout(240),
]

OVERLAPPED: dict[str, object] = {"async_scheduling": True}
CASES = [
    ("gpt2_four_layers", 2, 2, OVERLAPPED),
    ("opt_post_norm_four_layers", 2, 2, {}),
    ("qwen2_alternating", 1, 2, OVERLAPPED),
    ("mistral_sliding_four_layers", 1, 4, OVERLAPPED),
    ("llama_tied_biased_four_layers", 1, 2, OVERLAPPED),
    ("llama_sharded", 1, 3, OVERLAPPED),
    ("qwen3_four_layers", 2, 2, OVERLAPPED),
    ("qwen2_four_layers", 1, 2, {}),
    ("gemma2", 2, 2, {}),
    ("gemma4_moe", 1, 2, {}),
    ("smollm3", 1, 4, OVERLAPPED),
]


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(("variant", "width", "num_stages", "flags"), CASES)
def test_tokens_are_those_of_one_rank_and_of_transformers(
    variant: str, width: int, num_stages: int, flags: dict[str, object]
) -> None:
    several = {"tensor_parallel_size": width, "pipeline_parallel_size": num_stages}
    found = tokens(variant, block_size=8, **several, **flags)
    assert found == tokens(variant, block_size=8)
    check_greedy(variant, found)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    "flags",
    [
        {"preemption_mode": "swap", "swap_space": 1 << 20, **OVERLAPPED},
        {"preemption_mode": "recompute", **OVERLAPPED},
        {"preemption_mode": "swap", "swap_space": 1 << 20},
        {"kv_cache_dtype": "fp8_e4m3", **OVERLAPPED},
    ],
    ids=["swap, overlapped", "recompute, overlapped", "swap", "8 bits, overlapped"],
)
def test_preempted_requests_have_the_tokens_of_one_rank(flags: dict[str, object]) -> None:
    small = {"block_size": 8, "num_gpu_blocks_override": 32, "max_model_len": 96, **flags}
    assert tokens("llama", pipeline_parallel_size=3, **small) == tokens("llama", **small)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_shared_and_drawn_weights_are_divided_too(load_format: str, tmp_path: Path) -> None:
    flags = {"weights_folder": str(tmp_path), "load_format": load_format}
    expected = tokens("llama_tied_biased", load_format=load_format)
    assert tokens("llama_tied_biased", pipeline_parallel_size=3, **flags) == expected


# Each has one scheme and one kind of flags, and each scheme has both kinds. Stores are alike, and
# peers: test_tensor_parallel.py has all of them, with any numbers of ranks.
TIERS = [
    # Ranks per stage and stages of prefill, then of decode.
    ((1, 2, 1, 1), "redis", OVERLAPPED),
    ((1, 1, 1, 2), "grpc", OVERLAPPED),
    ((1, 2, 2, 1), "redis", {"block_size": 16}),
    ((2, 1, 1, 4), "grpc", {"block_size": 16}),
    ((2, 2, 1, 2), "redis", OVERLAPPED),
    ((1, 4, 2, 2), "grpc", OVERLAPPED),
]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(("sizes", "scheme", "flags"), TIERS)
def test_tiers_of_any_numbers_of_stages_hand_over(
    sizes: tuple[int, int, int, int],
    scheme: str,
    flags: dict[str, object],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Nothing is recomputed: decode loads the whole prompt, each rank its layers and heads."""
    path = tiny_checkpoint("llama_four_layers")
    width, stages, decode_width, decode_stages = sizes
    common = {
        "block_size": 8,
        "kv_transfer_head_slices": max(width, decode_width),
        "kv_transfer_layer_slices": max(stages, decode_stages),
        **flags,
    }
    redis_url = request.getfixturevalue("redis_server").url if scheme == "redis" else ""
    with ExitStack() as opened:
        shm_name = opened.enter_context(fresh_shm_name())
        common["kv_connector"] = kv_urls(tmp_path, shm_name, redis_url, timeout_s=20)[scheme]
        split = opened.enter_context(
            tiers(
                path,
                {"tensor_parallel_size": width, "pipeline_parallel_size": stages},
                {"tensor_parallel_size": decode_width, "pipeline_parallel_size": decode_stages},
                **common,
            )
        )
        check_handed_over(path, split)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("rank", [1, 2])
def test_a_pipeline_ends_when_a_stage_does(rank: int) -> None:
    with closing(three_stages()) as core:
        run_all(core, all_kinds()[:1])
        pids = pids_of(core)
        os.kill(pids[rank - 1], signal.SIGKILL)
        with pytest.raises(RanksLostError):
            run_all(core, [engine_request("late", tuple(prompt_of(9)), max_tokens=50)])
    assert not any(map(is_running, pids))


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("rank", [1, 2])
def test_a_stage_that_does_not_answer_ends_the_pipeline(rank: int) -> None:
    with closing(three_stages(step_timeout_s=2.0)) as core:
        run_all(core, all_kinds()[:1])
        pids = pids_of(core)
        os.kill(pids[rank - 1], signal.SIGSTOP)
        with pytest.raises(RanksLostError):
            run_all(core, [engine_request("late", tuple(prompt_of(9)), max_tokens=50)])
    assert not any(map(is_running, pids))


def test_a_failed_step_of_the_last_stage_ends_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(three_stages()) as core:
        run_all(core, all_kinds()[:1])
        pids = pids_of(core)
        monkeypatch.setattr(core._runner._steps, "launch", lambda batch: 1 / 0)
        with pytest.raises(RanksLostError, match="rank 0 has failed: division by zero"):
            run_all(core, [engine_request("late", tuple(prompt_of(9)), max_tokens=50)])
        for pid in pids:
            wait_until_ended(pid)


def test_waits_for_other_stages_are_as_long_as_steps_in_flight_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(three_stages(step_timeout_s=10.0)) as core:
        limits: list[float] = []
        monkeypatch.setattr(core._runner._ranks, "limit_waits", limits.append)
        monkeypatch.setattr(core._runner, "costs", StepCosts(1.0, 0.0))
        run_all(core, [engine_request("one", tuple(prompt_of(9)), max_tokens=12)])
    assert limits == [9 * 3 * SLOW_FACTOR, 3 * SLOW_FACTOR]


def test_an_interrupt_between_sending_and_computing_ends_the_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the stages before would be one step ahead from then on."""
    with closing(three_stages()) as core:
        run_all(core, all_kinds()[:1])
        pids = pids_of(core)
        sender = core._runner._sender
        send = sender.send

        def send_and_interrupt(batch: ScheduledBatch) -> None:
            send(batch)
            raise KeyboardInterrupt

        monkeypatch.setattr(sender, "send", send_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_all(core, [engine_request("late", tuple(prompt_of(9)), max_tokens=50)])
        for pid in pids:
            wait_until_ended(pid)


def three_stages(**flags: object) -> EngineCore:
    return build_core(
        tiny_checkpoint("llama"), "both", pipeline_parallel_size=3, **OVERLAPPED, **flags
    )
