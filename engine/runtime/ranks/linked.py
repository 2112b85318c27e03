"""`LinkedGroup`: ranks that divide each layer, and get messages by connections; `GlooRanks`."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
from typing_extensions import override

from engine.runtime.ranks.meeting import END, shut_down
from kernels.ranks import GroupEndedError, RankGroup, RanksLostError

__all__ = ["GlooRanks", "LinkedGroup"]


class LinkedGroup(RankGroup):
    """A rank of a group on one or several hosts.

    Args:
        rank: see `RankGroup`.
        size: see `RankGroup`.
        num_local: see `RankGroup`.
        steps: rank 0's connections to the others, or the one to rank 0, for messages; in a
            pipeline those of the engine's rank, through which the group sends none. Not closed
            with the group.
    """

    def __init__(self, rank: int, size: int, num_local: int, steps: Sequence[Connection]) -> None:
        self.rank, self.size, self.num_local = rank, size, num_local
        self._steps = steps
        self._limit_s: float | None = None
        self._is_lost = False

    @override
    def limit_waits(self, timeout_s: float) -> None:
        self._limit_s = timeout_s

    @override
    def send(self, data: bytes) -> None:
        try:
            for link in self._steps:
                link.send_bytes(data)
        except OSError as error:
            raise self._lost(f"a rank has ended: {error}") from error

    @override
    def receive(self, *, waits_forever: bool = False) -> bytes:
        (link,) = self._steps
        try:
            if not waits_forever and not link.poll(self._limit_s):
                raise self._lost("rank 0 has not answered in time")
            message = link.recv_bytes()
        except (OSError, EOFError) as error:
            raise self._lost(f"rank 0 is lost: {error}") from error
        if message == END:
            raise GroupEndedError
        return message

    @override
    def abort(self) -> None:
        """Ends the connections, which the other ranks notice; sums fail when the process ends."""
        self._is_lost = True
        for link in self._steps:
            shut_down(link)

    def _pad_columns(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Returns a rank's columns, as many as the rank with the most of them has."""
        widest = -(-num_columns // self.size)
        return torch.nn.functional.pad(part, (0, widest - part.shape[1]))

    def _join_columns(self, padded: Iterable[torch.Tensor], num_columns: int) -> torch.Tensor:
        """Joins all ranks' columns, of which each has as many as the rank with the most."""
        ends = [rank * num_columns // self.size for rank in range(self.size + 1)]
        widths = [end - start for start, end in pairwise(ends)]
        parts = [columns[:, :width] for columns, width in zip(padded, widths, strict=True)]
        return torch.cat(parts, dim=1)

    def _lost(self, message: str) -> RanksLostError:
        self.abort()
        return RanksLostError(message)


class GlooRanks(LinkedGroup):
    """A rank of a group that adds up through gloo.

    Args:
        rank: see `RankGroup`.
        size: see `RankGroup`.
        num_local: see `RankGroup`.
        gloo: torch's process group.
        steps: see `LinkedGroup`.
    """

    def __init__(
        self, rank: int, size: int, num_local: int, gloo: Any, steps: Sequence[Connection]
    ) -> None:
        super().__init__(rank, size, num_local, steps)
        self._gloo = gloo

    @override
    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Adds up the tensors in place, in gloo's order."""
        if partial.numel():
            self._wait(lambda: self._gloo.allreduce([partial]))
        return partial

    @override
    def gather_columns(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        if not len(part):
            return part.new_empty((0, num_columns)) if self.rank == 0 else part
        sent = self._pad_columns(part, num_columns)
        if self.rank > 0:
            self._wait(lambda: self._gloo.gather([], sent, 0))
            return part
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        self._wait(lambda: self._gloo.gather(parts, sent, 0))
        return self._join_columns(parts, num_columns)

    @override
    def limit_waits(self, timeout_s: float) -> None:
        super().limit_waits(timeout_s)
        self._gloo._set_default_timeout(timedelta(seconds=timeout_s))

    @override
    def close(self) -> None:
        self._gloo = None

    def _wait(self, start: Callable[[], Any]) -> None:
        if self._is_lost:
            raise RanksLostError("another rank has ended")
        try:
            start().wait()
        except RuntimeError as error:
            raise self._lost(f"another rank is lost: {error}") from error
