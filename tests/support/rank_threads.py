"""The ranks of an engine as threads of one process."""

import threading
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from engine.config import EngineConfig
from engine.runtime.ranks import nccl
from engine.runtime.ranks.loop import compute_batches
from engine.runtime.ranks.pipeline import PipelineLinks, PipelineRanks
from engine.runtime.ranks.rank_transfers import RankTransfers
from engine.runtime.ranks.started_ranks import StartedRanks
from kernels.ranks import EngineRanks, GroupEndedError, RanksLostError
from tests.support.fake_nccl import FakeNccl

__all__ = ["RankThreads"]

_WAIT_S = 60


class _Rank0(StartedRanks):
    """Rank 0 of ranks that are threads.

    Args:
        opened: its access to the others.
    """

    def __init__(self, opened: EngineRanks) -> None:
        super().__init__(opened, 0, opened.size)
        self.transfers: list[Connection] = []

    def watch(self, on_lost: object) -> None: ...

    def abort(self) -> None:
        self._opened.abort()

    def close(self) -> None:
        self._opened.close()


class RankThreads:
    """The ranks of an engine as threads; `start` takes the place of `processes.start_ranks`.

    Attributes:
        library: what the ranks of a stage use instead of NCCL, if `nccl._load_nccl` returns it.
        first: rank 0.
        others: the others, in their order.
    """

    first: _Rank0
    others: list[EngineRanks]

    def __init__(self) -> None:
        self.library = FakeNccl(1)
        self._threads: list[threading.Thread] = []
        self._transfers: list[Connection] = []  # open, as rank 0 would else seem to have ended

    def open(self, config: EngineConfig) -> None:
        """Connects the ranks."""
        width, size = config.tensor_parallel_size, config.num_ranks
        self.library = FakeNccl(width)
        steps: list[dict[int, Connection]] = [{} for _ in range(size)]
        for rank in range(1, size):
            steps[0][rank], steps[rank][0] = Pipe()
        before: dict[int, Connection] = {}
        after: dict[int, Connection] = {}
        for rank in range(width, size):
            before[rank - width], after[rank] = Pipe()
        first, *self.others = (
            _opened(config, rank, PipelineLinks(steps[rank], before.get(rank), after.get(rank)))
            for rank in range(size)
        )
        self.first = _Rank0(first)

    def start(self, config: EngineConfig, _: object) -> _Rank0:
        """What starts the ranks of an engine; returns rank 0."""
        self.open(config)
        for ranks in self.others:
            arguments = replace(config, num_threads=1), ranks, self._open_transfers(ranks)
            thread = threading.Thread(target=self._follow, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self.first

    def join(self) -> None:
        """Waits until the other ranks have ended; checks that all have called NCCL alike."""
        for thread in self._threads:
            thread.join(_WAIT_S)
            assert not thread.is_alive()
        assert self.library.differences == []

    def _open_transfers(self, ranks: EngineRanks) -> RankTransfers:
        connection, theirs = Pipe()
        self._transfers.append(connection)
        return RankTransfers(theirs, ranks)

    @staticmethod
    def _follow(config: EngineConfig, ranks: EngineRanks, transfers: RankTransfers) -> None:
        with suppress(GroupEndedError, RanksLostError):
            compute_batches(config, ranks, transfers, None)


def _opened(config: EngineConfig, rank: int, links: PipelineLinks) -> EngineRanks:
    size = config.num_ranks
    group = nccl.open_group(config, rank, size, rank, links.steps)
    if config.pipeline_parallel_size > 1:
        return PipelineRanks(rank, config, group, links, size, rank)
    assert group is not None
    return group
