"""A `BlockCopier` whose copies move no bytes until the test ends them."""

import threading
from collections.abc import Callable, Sequence

import torch

from kvstore.mover.copies import BlockCopier, HostCopier
from kvstore.mover.pool_objects import as_objects
from kvstore.mover.staging import Segment
from kvstore.transfer_form import BlockSlicing
from tests.support.connector_rig import TIMEOUT_S

__all__ = ["HeldCopier", "HeldCopy", "StagedCopier"]


class StagedCopier(HostCopier):
    """Copies on the host but exposes no rows of the pool, so that blocks go through segments."""

    def __init__(self, pool: torch.Tensor, slicing: BlockSlicing) -> None:
        super().__init__(as_objects(pool, slicing))

    def rows(self, object_ids: Sequence[int]) -> None:
        return None


class HeldCopy:
    """One copy.

    Attributes:
        is_awaited: set once a thread waits for the copy.
        is_over: set once the copy has ended.
    """

    def __init__(self, move: Callable[[], None]) -> None:
        self.is_awaited = threading.Event()
        self._move = move
        self.is_over = threading.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        """Ends the copy: moves the bytes, or fails with `error`."""
        if error is None:
            self._move()
        self._error = error
        self.is_over.set()

    def wait(self) -> None:
        self.is_awaited.set()
        assert self.is_over.wait(TIMEOUT_S), "the test did not end the copy"
        if self._error is not None:
            raise self._error


class HeldCopier(BlockCopier):
    """Holds every copy in `copies`, the oldest first; raises `refusal` instead if it is set."""

    def __init__(self, pool: torch.Tensor, slicing: BlockSlicing) -> None:
        self.copies: list[HeldCopy] = []
        self.refusal: Exception | None = None
        self.is_closed = False
        self._host = HostCopier(pool)

    def gather(self, object_ids: Sequence[int], segment: Segment) -> HeldCopy:
        segment.payload.fill_(0xAA)  # so that reading too early shows
        return self._hold(lambda: self._host.gather(object_ids, segment))

    def scatter(self, segment: Segment, object_ids: Sequence[int]) -> HeldCopy:
        return self._hold(lambda: self._host.scatter(segment, object_ids))

    def close(self) -> None:
        for copy in self.copies:
            assert copy.is_over.wait(TIMEOUT_S)
        self.is_closed = True

    def _hold(self, move: Callable[[], None]) -> HeldCopy:
        if self.refusal is not None:
            raise self.refusal
        self.copies.append(HeldCopy(move))
        return self.copies[-1]
