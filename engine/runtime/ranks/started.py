"""`StartedRanks`: the ranks of an engine, and how rank 0 learns that one has ended."""

from abc import abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from typing_extensions import override

from kernels.ranks import EngineRanks, RankGroup

__all__ = ["StartedRanks"]


class StartedRanks(EngineRanks):
    """Ranks that were started and have met.

    Args:
        opened: the access to the other ranks.

    Attributes:
        transfers: connections for transfers: rank 0's to the others in their order, or the one to
            rank 0.
    """

    transfers: list[Connection]

    def __init__(self, opened: EngineRanks, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.num_local, self.local_rank = opened.num_local, opened.local_rank
        self.stage, self.num_stages = opened.stage, opened.num_stages
        self._opened = opened

    @abstractmethod
    def watch(self, on_lost: Callable[[], None]) -> None:
        """Registers a function to call when another rank has ended."""

    @property
    @override
    def group(self) -> RankGroup | None:
        return self._opened.group

    @override
    def limit_waits(self, timeout_s: float) -> None:
        self._opened.limit_waits(timeout_s)

    @override
    def send(self, data: bytes) -> None:
        self._opened.send(data)

    @override
    def receive(self, *, waits_forever: bool = False) -> bytes:
        return self._opened.receive(waits_forever=waits_forever)

    @override
    def send_tokens(self, data: bytes) -> None:
        self._opened.send_tokens(data)

    @override
    def receive_tokens(self, *, waits: bool = True) -> bytes | None:
        return self._opened.receive_tokens(waits=waits)

    @override
    def send_hidden(self, hidden: torch.Tensor) -> None:
        self._opened.send_hidden(hidden)

    @override
    def receive_hidden(self, hidden: torch.Tensor) -> None:
        self._opened.receive_hidden(hidden)
