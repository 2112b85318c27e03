"""Ranks with a GPU each: the steps of GPUs, and calls of NCCL, on the CPU in threads."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
import torch

from engine.config import EngineConfig
from engine.runtime import model_runner
from engine.runtime.model_runner import ModelRunner
from engine.runtime.ranks import nccl, processes
from engine.runtime.ranks.loop import compute_batches
from engine.runtime.ranks.nccl import NcclRanks
from engine.runtime.ranks.transfers import RankTransfers
from kernels.ranks import GroupEndedError, RanksLostError
from tests.support.checkpoints import tiny_checkpoint
from tests.support.fake_nccl import FakeNccl
from tests.support.rank_engines import all_kinds, check_greedy, tokens
from tests.support.real_engines import build_core, run_all
from tests.support.requests import engine_request
from tests.support.traced_graphs import RerunDeviceSteps

WAIT_S = 60
CPU = torch.device("cpu")
UNLIMITED = {"tensor_parallel_size": 2, "num_gpu_blocks_override": None}


class Rank0(NcclRanks):
    """Rank 0 of ranks that are threads."""

    transfers: tuple[Connection, ...] = ()

    def watch(self, on_lost: object) -> None: ...


class Group:
    """Ranks that are threads, for one engine.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        pipes = [Pipe() for _ in range(size - 1)]
        self.library = FakeNccl(size)
        self.first = Rank0(0, size, 1, 0, CPU, [own for own, _ in pipes], self.library)
        self.others = [
            NcclRanks(rank, size, 1, 0, CPU, [theirs], self.library)
            for rank, (_, theirs) in enumerate(pipes, 1)
        ]
        self._threads: list[threading.Thread] = []

    def start(self, config: EngineConfig, _: object) -> Rank0:
        """What starts the ranks of an engine; returns rank 0."""
        for ranks in self.others:
            own = replace(config, num_threads=1)
            thread = threading.Thread(target=self._follow, args=(own, ranks), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self.first

    def join(self) -> None:
        """Waits until the other ranks have ended."""
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    @staticmethod
    def _follow(config: EngineConfig, ranks: NcclRanks) -> None:
        transfers = RankTransfers(Pipe()[1], ends_process=False)
        with suppress(GroupEndedError, RanksLostError):
            compute_batches(config, ranks, transfers, None)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    two = Group(2)
    monkeypatch.setattr(nccl, "_stream_of", lambda device: 0)
    monkeypatch.setattr(model_runner, "HostSteps", RerunDeviceSteps)
    monkeypatch.setattr(processes, "start_ranks", two.start)
    yield two
    two.join()


@contextmanager
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as context:
        context.setattr(processes, "start_ranks", lambda *_: None)
        yield


@pytest.mark.parametrize("variant", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_tokens_are_those_of_one_rank_and_of_transformers(
    variant: str, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"block_size": 8, "async_scheduling": True}
    found = tokens(variant, **flags, tensor_parallel_size=2)
    with _one_rank(monkeypatch):
        assert found == tokens(variant, **flags)
    check_greedy(variant, found)


def test_pools_are_as_large_as_the_rank_with_the_least_memory_allows(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {0: 9 << 20, 1: (5 << 20) + 1}
    monkeypatch.setattr(ModelRunner, "profile", lambda self, _: free[self._ranks.rank])
    with closing(build_core(tiny_checkpoint("llama"), "both", **UNLIMITED)) as core:
        block_bytes = core._runner.kv_pool[0].nbytes
        assert core.num_blocks == (5 << 20) // block_bytes


def test_a_rank_that_is_lost_ends_the_engine(group: Group) -> None:
    with closing(build_core(tiny_checkpoint("llama"), "both", tensor_parallel_size=2)) as core:
        run_all(core, all_kinds()[:1])
        group.others[0].abort()
        with pytest.raises(RanksLostError):
            run_all(core, [engine_request("late", (1, 2, 3), max_tokens=50)])


def test_a_wait_for_the_device_ends_when_another_rank_does_not_compute(group: Group) -> None:
    group.first.limit_waits(0.01)
    with pytest.raises(RanksLostError, match="not answered in time"):
        group.first.wait(lambda: False)


def test_a_wait_for_the_device_ends_when_the_connection_does(group: Group) -> None:
    group.others[0].abort()
    with pytest.raises(RanksLostError, match="has ended"):
        group.first.wait(lambda: False)
