"""Ranks with a GPU each: the steps of GPUs, and calls of NCCL, on the CPU in threads."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.loop.core import EngineCore
from engine.runtime import rank_batches as batches
from engine.runtime.launch.launcher import Launcher
from engine.runtime.launch.pools import Pools
from engine.runtime.rank_batches import least_of_all
from engine.runtime.ranks import nccl, processes
from kernels.ranks import DeviceRankGroup, RanksLostError
from tests.support.checkpoints import tiny_checkpoint
from tests.support.rank_engines import all_kinds, check_greedy, tokens
from tests.support.rank_threads import RankThreads
from tests.support.real_engines import build_core, run_all
from tests.support.requests import engine_request
from tests.support.runner_kinds import use_kind

MEBIBYTE = 2**20
OVERLAPPED: dict[str, object] = {"async_scheduling": True}
SOON = 30
CASES = [
    ("llama", (2, 1), "device, rerun", OVERLAPPED),
    ("llama_four_layers", (1, 2), "device, graphs", OVERLAPPED),
    ("llama", (1, 3), "device, eager", {}),
    ("qwen3_four_layers", (2, 2), "device, rerun", OVERLAPPED),
    ("lfm2_biased_four_layers", (2, 2), "device, rerun", OVERLAPPED),
]
RARE_CASES = [
    ("gpt2", (2, 1), "device, rerun", OVERLAPPED),
    ("llama_tied_biased_four_layers", (1, 2), "device, rerun", {}),
    ("llama", (1, 3), "device, graphs", OVERLAPPED),
    ("mistral_sliding_four_layers", (1, 4), "device, graphs", OVERLAPPED),
    ("gpt2_four_layers", (2, 2), "device, eager", {}),
    ("opt_post_norm_four_layers", (2, 2), "device, rerun", OVERLAPPED),
]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankThreads]:
    ranks = RankThreads()
    monkeypatch.setattr(nccl, "_current_stream", lambda device: 0)
    monkeypatch.setattr(nccl, "_load_nccl", lambda: ranks.library)
    monkeypatch.setattr(processes, "start_ranks", ranks.start)
    use_kind("device, rerun", monkeypatch)
    yield ranks
    ranks.join()


@contextmanager
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as context:
        context.setattr(processes, "start_ranks", lambda *_: None)
        yield


def _sizes(width: int, num_stages: int) -> dict[str, object]:
    return {"tensor_parallel_size": width, "pipeline_parallel_size": num_stages}


def _core(width: int, num_stages: int, **flags: object) -> EngineCore:
    variant = "llama" if num_stages in (1, 3) else "llama_four_layers"
    return build_core(tiny_checkpoint(variant), "both", **_sizes(width, num_stages), **flags)


@pytest.mark.parametrize(
    ("variant", "sizes", "kind", "flags"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in RARE_CASES)],
)
def test_tokens_are_those_of_one_rank_and_of_transformers(
    variant: str,
    sizes: tuple[int, int],
    kind: str,
    flags: dict[str, object],
    threads: RankThreads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_kind(kind, monkeypatch)
    found = tokens(variant, block_size=8, **flags, **_sizes(*sizes))
    with _one_rank(monkeypatch):
        assert found == tokens(variant, block_size=8, **flags)
    check_greedy(variant, found)


def test_ranks_that_call_nccl_differently_are_found(threads: RankThreads) -> None:
    groups = _meet_two(threads)
    with ThreadPoolExecutor(2) as executor:
        calls = [
            executor.submit(group.all_reduce, torch.ones(1, width))
            for group, width in zip(groups, (2, 3), strict=True)
        ]
        for call in calls:
            with pytest.raises(RanksLostError):
                call.result(SOON)
    assert {count for calls in threads.library.differences for _, count, _ in calls} == {2, 3}
    threads.library.differences.clear()


@pytest.mark.parametrize(
    "flags",
    [
        {"preemption_mode": "swap", "swap_space": 1 << 20, **OVERLAPPED},
        pytest.param({"preemption_mode": "recompute"}, marks=pytest.mark.slow),
    ],
)
def test_preempted_requests_have_the_tokens_of_one_rank(
    flags: dict[str, object], threads: RankThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"block_size": 8, "num_gpu_blocks_override": 32, "max_model_len": 96, **flags}
    found = tokens("llama", pipeline_parallel_size=3, **small)
    with _one_rank(monkeypatch):
        assert found == tokens("llama", **small)


@pytest.mark.parametrize(
    ("poorest", "sizes"), [(0, (2, 1)), (-1, (1, 3)), (0, (2, 2)), (-1, (2, 2))]
)
def test_pools_are_as_large_as_the_rank_with_the_least_memory_allows(
    poorest: int, sizes: tuple[int, int], threads: RankThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    poorest %= sizes[0] * sizes[1]

    make_pools = Launcher._make_pools

    def make_with_left(launcher: Launcher, _: int | None) -> Pools:
        is_poorest = launcher._ranks is not None and launcher._ranks.rank == poorest
        return make_pools(launcher, 5 * MEBIBYTE + 1 if is_poorest else 9 * MEBIBYTE)

    monkeypatch.setattr(Launcher, "_make_pools", make_with_left)
    with closing(_core(*sizes, num_gpu_blocks_override=None)) as core:
        block_bytes = core._runner.kv_pool[0].nbytes
        assert core.num_blocks == 5 * MEBIBYTE // block_bytes


@pytest.mark.parametrize(("lost", "sizes"), [(0, (2, 1)), (0, (1, 3)), (-1, (1, 3)), (-1, (2, 2))])
def test_a_rank_that_is_lost_ends_the_engine(
    lost: int, sizes: tuple[int, int], threads: RankThreads
) -> None:
    with closing(_core(*sizes)) as core:
        run_all(core, all_kinds()[:1])
        threads.others[lost].abort()
        with pytest.raises(RanksLostError):
            run_all(core, [engine_request("late", (1, 2, 3), max_tokens=50)])


def test_a_stage_that_does_not_compute_ends_the_engine(
    threads: RankThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes = threading.Event()
    with closing(_core(1, 3, step_timeout_s=2.0)) as core:
        run_all(core, all_kinds()[:1])
        monkeypatch.setattr(threads.others[0], "receive_hidden", lambda hidden: wakes.wait())
        with pytest.raises(RanksLostError, match="not answered in time"):
            run_all(core, [engine_request("late", (1, 2, 3), max_tokens=50)])
    wakes.set()


def test_all_stages_compute_at_once(threads: RankThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage does not wait for the tokens of other rows than those that it runs."""
    with closing(_core(1, 3, **OVERLAPPED)) as core:
        sent: list[int] = []
        send_hidden, send_tokens = threads.others[1].send_hidden, threads.first.send_tokens
        most_ahead = [0]

        def count_step(hidden: object) -> None:
            send_hidden(hidden)
            sent.append(1)
            most_ahead[0] = max(most_ahead[0], sum(sent))

        def count_tokens(data: bytes) -> None:
            sent.append(-1)
            send_tokens(data)

        monkeypatch.setattr(threads.others[1], "send_hidden", count_step)
        monkeypatch.setattr(threads.first, "send_tokens", count_tokens)
        run_all(core, [engine_request(str(n), (n, 2, 3), max_tokens=9) for n in range(6)])
    assert 1 < most_ahead[0] <= 3


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_a_wait_for_the_device_ends_when_another_rank_does_not_compute(
    sizes: tuple[int, int], threads: RankThreads
) -> None:
    threads.open(EngineConfig(model="m", **_sizes(*sizes)))
    threads.first.limit_waits(0.01)
    group = threads.first.device_group
    assert group is not None
    with pytest.raises(RanksLostError, match="not answered in time"):
        group.wait(lambda: False)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_waits_for_the_device_end_when_the_connection_does(
    sizes: tuple[int, int], threads: RankThreads
) -> None:
    threads.open(EngineConfig(model="m", **_sizes(*sizes)))
    threads.first.abort()
    for ranks in threads.others:
        group = ranks.device_group
        assert group is not None
        with pytest.raises(RanksLostError, match="has ended"):
            group.wait(lambda: False)


def test_stages_of_one_rank_have_a_gpu_each_and_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "resolve_device", lambda *_: torch.device("cuda"))
    config = EngineConfig(model="m", **_sizes(1, 2))
    with ExitStack() as files:
        own, (other,), steps = processes._tasks(config, None, files)
        both = [own.open_ranks(steps), other.open_ranks()]
    for number, ranks in enumerate(both):
        assert (ranks.local_rank, ranks.num_local, ranks.group) == (number, 2, None)
        ranks.close()


def test_every_rank_of_every_stage_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "resolve_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigurationError, match="this machine 4 ranks, and it has 3 GPUs"):
        processes._check_machine(EngineConfig(model="m", **_sizes(2, 2)))


def test_a_rank_whose_connection_ends_before_it_has_a_name_fails() -> None:
    own, theirs = Pipe()
    theirs.close()
    with pytest.raises(RanksLostError, match="rank 0 is lost"):
        nccl._receive_name(own)


def _open_two(threads: RankThreads) -> tuple[DeviceRankGroup, DeviceRankGroup]:
    """Returns two ranks, which have not met in NCCL."""
    threads.open(EngineConfig(model="m", **_sizes(2, 1)))
    first, second = threads.first.device_group, threads.others[0].device_group
    assert first is not None
    assert second is not None
    return first, second


def _add_up(group: DeviceRankGroup) -> float:
    return float(group.all_reduce(torch.ones(1, 1)))


def _meet_two(threads: RankThreads) -> tuple[DeviceRankGroup, DeviceRankGroup]:
    """Returns two ranks, which have added up once."""
    groups = _open_two(threads)
    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(_add_up, groups)) == [2, 2]
    return groups


def test_ranks_meet_though_one_loads_for_long(
    threads: RankThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = _open_two(threads)
    monkeypatch.setattr(nccl, "_MEETING_S", 0.01)
    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(_add_up, groups[0])
        time.sleep(0.5)
        second = executor.submit(_add_up, groups[1])
        assert first.result(SOON) == second.result(SOON) == 2
    groups[0].close()


def test_a_rank_that_is_lost_while_others_meet_ends_them(threads: RankThreads) -> None:
    groups = _open_two(threads)
    groups[1].abort()
    with pytest.raises(RanksLostError, match="has ended"):
        _add_up(groups[0])


def test_the_group_closes_though_nccl_waits_for_graphs(
    threads: RankThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_ABORT_S", 0.01)
    groups = _meet_two(threads)
    threads.library.abort_returns.clear()
    closing_ = threading.Thread(target=groups[0].close, daemon=True)
    closing_.start()
    closing_.join(SOON)
    assert not closing_.is_alive()
    threads.library.abort_returns.set()


def test_abort_ends_a_call_that_hangs_on_the_host(
    threads: RankThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_LOCK_S", 0.01)
    groups = _meet_two(threads)
    with ThreadPoolExecutor(2) as executor:
        hanging = executor.submit(_add_up, groups[0])
        while not groups[0]._lock.locked():
            time.sleep(0.01)
        executor.submit(groups[0].abort).result(SOON)
        with pytest.raises(RanksLostError):
            hanging.result(SOON)


def test_the_exchange_of_pool_sizes_ends_with_another_rank(
    threads: RankThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, other = _open_two(threads)
    never = SimpleNamespace(is_done=lambda: False)
    monkeypatch.setattr(group, "all_reduce", lambda partial: partial)
    monkeypatch.setattr(batches, "fetch", lambda *_: never)
    other.abort()
    with pytest.raises(RanksLostError, match="has ended"):
        least_of_all(threads.first, 5, torch.device("cpu"))


def test_the_engine_learns_of_an_ended_process_before_nccl_has_aborted() -> None:
    events: list[str] = []
    ranks = processes.RankProcesses.__new__(processes.RankProcesses)
    ranks._is_closing = False
    children: Any = SimpleNamespace(kill=lambda: events.append("kill"), has_ended=False)
    opened: Any = SimpleNamespace(abort=lambda: events.append("abort"))
    ranks._children, ranks._opened = children, opened
    ranks.watch(lambda: events.append("lost"))
    ranks._on_child_end()
    assert events == ["lost", "kill", "abort"]
