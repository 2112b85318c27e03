"""`GlooRanks`: ranks that divide each layer, on one or several hosts."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from typing_extensions import override

from engine.runtime.ranks.linked import LinkedGroup
from kernels.ranks import RanksLostError

__all__ = ["GlooRanks"]


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
