"""One model over several ranks: the tokens of one rank, and the end of a group."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.loop.core import EngineCore
from kernels.library.commands import library
from kernels.ranks import RanksLostError
from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.kv_urls import fresh_shm_name, kv_urls
from tests.support.pairs import pairs
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
    pytest.mark.timeout(180),
]

CASES = [
    ("llama_six_heads", 3),
    ("gpt2_six_heads", 3),
    ("qwen2", 4),  # of two KV heads
    ("opt_six_heads", 3),
    ("opt_post_norm", 4),
    ("mistral_sliding", 2),
    ("qwen3_mostly_sliding", 4),
    ("qwen2_alternating", 2),
    ("llama_sharded", 2),
    ("olmo3", 4),  # norms of whole projections; of two KV heads
    ("phi3_partial", 2),  # joined tensors
    ("glm4", 2),  # rows in another order
    ("falcon_new", 2),  # Q, K and V joined by KV head
    ("gpt_neox", 4),
    ("gemma3", 2),
    ("gemma4_moe", 2),  # layers of two shapes, and experts beside MLPs
    ("granite", 4),  # factors, and biases
]


@pytest.mark.sampled(one_in=9)
@pytest.mark.parametrize(("variant", "num_ranks"), CASES)
def test_tokens_are_those_of_one_rank_and_of_transformers(variant: str, num_ranks: int) -> None:
    found = tokens(variant, tensor_parallel_size=num_ranks, block_size=8)
    assert found == tokens(variant, block_size=8)
    check_greedy(variant, found)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("variant", "num_ranks"), [("llama", 2), ("gpt2_six_heads", 3)])
def test_clear_decisions_in_bfloat16_are_those_of_one_rank(variant: str, num_ranks: int) -> None:
    """Clear are those whose two likeliest tokens differ by more than twice what rounding does."""
    one, several = (
        likeliest(variant, dtype="bfloat16", tensor_parallel_size=size) for size in (1, num_ranks)
    )
    difference = max(
        abs(own[token] - theirs[token])
        for own, theirs in zip(one, several, strict=True)
        for token in own.keys() & theirs.keys()
    )
    clear = [
        (max(own, key=own.__getitem__), max(theirs, key=theirs.__getitem__))
        for own, theirs in zip(one, several, strict=True)
        if max(own.values()) - sorted(own.values())[-2] > 2 * difference
    ]
    assert all(token == other for token, other in clear)
    assert len(clear) > 0.5 * len(one)


def likeliest(variant: str, **flags: object) -> list[dict[int, float]]:
    """Returns log-probabilities of the likeliest tokens at each place of some prompts."""
    prompts = [tuple(prompt_of(200, seed=seed)) for seed in range(3)]
    asked = [
        engine_request(str(index), prompt, max_tokens=1, prompt_logprobs=4)
        for index, prompt in enumerate(prompts)
    ]
    with closing(build_core(tiny_checkpoint(variant), "both", **flags)) as core:
        outputs = run_all(core, asked)
    return [
        dict(zip(place.top_token_ids, place.top_logprobs, strict=True))
        for each in outputs.values()
        for output in each
        for place in output.prompt_logprobs
    ]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "flags",
    [
        {"preemption_mode": "swap", "swap_space": 1 << 20, "async_scheduling": True},
        {"preemption_mode": "recompute", "turns_folder": "here"},
        {"kv_cache_dtype": "fp8_e4m3", "async_scheduling": True},
    ],
    ids=["swap, overlapped", "recompute", "8 bits, overlapped"],
)
def test_preempted_requests_have_the_tokens_of_one_rank(
    flags: dict[str, object], tmp_path: Path
) -> None:
    if "turns_folder" in flags:
        flags = {**flags, "turns_folder": str(tmp_path)}
    small = {"block_size": 8, "num_gpu_blocks_override": 32, "max_model_len": 96, **flags}
    assert tokens("llama", tensor_parallel_size=2, **small) == tokens("llama", **small)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_shared_and_drawn_weights_are_divided_too(load_format: str, tmp_path: Path) -> None:
    flags = {"weights_folder": str(tmp_path), "load_format": load_format}
    expected = tokens("llama", load_format=load_format)
    for _ in range(2):  # the second time the files are there
        assert tokens("llama", tensor_parallel_size=2, **flags) == expected
    num_files = 0 if load_format == "dummy" else 2
    assert len(list(tmp_path.glob("weights-*[0-9a-f]"))) >= num_files


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize(
    ("num_ranks", "decode_ranks", "variant", "scheme", "flags"),
    pairs(
        (1, 2, 4),
        (1, 2, 4),
        ("gpt2", "llama"),  # of four and of two KV heads
        ("shm", "redis", "grpc", "nixl"),  # file: test_rank_hosts.py
        ({"async_scheduling": True}, {"kv_transfer_layer_slices": 3}),
    ),
)
def test_tiers_of_any_numbers_of_ranks_hand_over(
    num_ranks: int,
    decode_ranks: int,
    variant: str,
    scheme: str,
    flags: dict[str, object],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Nothing is recomputed: decode loads the whole prompt, each rank its heads."""
    path = tiny_checkpoint(variant)
    num_heads = 4 if variant == "gpt2" else 2
    common = {"block_size": 8, **flags}
    if num_ranks != decode_ranks:
        common["kv_transfer_head_slices"] = min(max(num_ranks, decode_ranks), num_heads)
    redis_url = request.getfixturevalue("redis_server").url if scheme == "redis" else ""
    with ExitStack() as opened:
        shm_name = opened.enter_context(fresh_shm_name())
        common["kv_connector"] = kv_urls(tmp_path, shm_name, redis_url, timeout_s=20)[scheme]
        sizes = [{"tensor_parallel_size": size} for size in (num_ranks, decode_ranks)]
        check_handed_over(path, opened.enter_context(tiers(path, *sizes, **common)))


def test_a_group_ends_when_a_rank_does() -> None:
    with closing(two_ranks()) as core:
        run_all(core, all_kinds()[:1])
        (pid,) = pids_of(core)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RanksLostError):
            run_all(core, [engine_request("late", tuple(prompt_of(9)), max_tokens=50)])
    assert not is_running(pid)


def test_an_idle_engine_notices_that_a_rank_has_ended() -> None:
    with closing(two_ranks()) as core:
        core.run_step(lambda outputs: None)
        assert core.is_stalled
        (pid,) = pids_of(core)
        os.kill(pid, signal.SIGKILL)
        core.wait()
        with pytest.raises(RanksLostError, match="a rank of the engine has ended"):
            core.run_step(lambda outputs: None)


def test_signals_that_drain_a_worker_do_not_end_its_ranks() -> None:
    with closing(two_ranks()) as core:
        (pid,) = pids_of(core)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        run_all(core, all_kinds()[:1])


def test_a_rank_that_does_not_answer_ends_the_group() -> None:
    with closing(two_ranks(step_timeout_s=2.0)) as core:
        run_all(core, all_kinds()[:1])
        (pid,) = pids_of(core)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RanksLostError):
            run_all(core, [engine_request("late", tuple(prompt_of(9)), max_tokens=50)])
    assert not is_running(pid)


def test_a_frozen_rank_ends_with_the_process_of_rank_0() -> None:
    code = (
        "from tests.integration.test_tensor_parallel import pids_of, two_ranks\n"
        "core = two_ranks()\n"
        "print(*pids_of(core), flush=True)\n"
        "input()"
    )
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        process.kill()
    wait_until_ended(pid)


def test_a_failed_step_of_rank_0_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(two_ranks()) as core:
        run_all(core, all_kinds()[:1])
        (pid,) = pids_of(core)
        monkeypatch.setattr(core._runner._steps, "launch", lambda batch: 1 / 0)
        core.scheduler.add(engine_request("late", tuple(prompt_of(9)), max_tokens=50))
        with pytest.raises(RanksLostError, match="rank 0 has failed: division by zero"):
            core.run_step(lambda outputs: None)
        wait_until_ended(pid)


@pytest.mark.parametrize(
    ("variant", "flags", "message"),
    [
        ("llama", {"tensor_parallel_size": 3}, "--tensor-parallel-size is 3; it must divide"),
        ("llama", {"tensor_parallel_size": 65}, "is 65; at most 64"),
        (
            "falcon_new",
            {"tensor_parallel_size": 4},
            "--tensor-parallel-size is 4; it must divide the model's 2 KV heads",
        ),
        (
            "llama",
            {"tensor_parallel_size": 2, "kv_connector": "memory://"},
            "--kv-connector memory:// works with 1 only",
        ),
        (
            "llama",
            {"tensor_parallel_size": 2, "kv_connector": "multi://grpc://,grpc://"},
            "--kv-connector multi:// works with 1 only",
        ),
        (
            "llama",
            {"tensor_parallel_size": 2, "kv_connector": "faulty+grpc://?faults=drop:1"},
            r"--kv-connector faulty\+grpc:// works with 1 only",
        ),
        (
            "llama",
            {"tensor_parallel_size": 2, "dtype": "float16"},
            "--dtype float16 works with 1 only",
        ),
        (
            "llama",
            {
                "tensor_parallel_size": 2,
                "kv_connector": "file:///tmp",
                "kv_transfer_head_slices": 1,
            },
            "--kv-transfer-head-slices is 1; it must be a multiple of the 2 ranks",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    variant: str, flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_core(tiny_checkpoint(variant), "both", **flags)


def test_a_bad_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--tensor-parallel-size is 0; it must be >= 1"):
        EngineConfig(model="m", tensor_parallel_size=0)


def two_ranks(**flags: object) -> EngineCore:
    return build_core(tiny_checkpoint("llama"), "both", tensor_parallel_size=2, **flags)
