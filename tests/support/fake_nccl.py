"""`FakeNccl`: NCCL's functions for ranks that are threads of one process and compute on the CPU."""

import ctypes
import threading
from typing import Any

import numpy as np

_TYPES = {4: np.int64, 7: np.float32}
_WAIT_S = 60
_MAX_SIZE = 100  # of a group; handles number groups and ranks


class FakeNccl:
    """Adds up, joins and copies memory. Ranks that wait for one that is lost fail when it aborts.

    Args:
        size: number of ranks of each group.

    Attributes:
        abort_returns: `ncclCommAbort` returns once it is set, as it is at first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.abort_returns = threading.Event()
        self.abort_returns.set()
        self._groups: list[_Group] = []

    def ncclGetUniqueId(self, name: Any) -> int:
        self._groups.append(_Group(self._size))
        name._obj.internal = str(len(self._groups)).encode()
        return 0

    def ncclCommInitRank(self, comm: Any, size: int, name: Any, rank: int) -> int:
        assert size == self._size
        number = int(name.internal)
        comm._obj.value = number * _MAX_SIZE + rank
        return self._groups[number - 1].meet()

    def ncclAllReduce(
        self, sent: int, received: int, count: int, kind: int, operation: int, comm: int, _: int
    ) -> int:
        assert operation == 0
        return self._exchange(comm, sent, count, received, count, kind, lambda all_: sum(all_))

    def ncclAllGather(
        self, sent: int, received: int, count: int, kind: int, comm: int, _: int
    ) -> int:
        total = count * self._size
        return self._exchange(comm, sent, count, received, total, kind, np.concatenate)

    def ncclBroadcast(
        self, sent: int, received: int, count: int, kind: int, root: int, comm: int, _: int
    ) -> int:
        return self._exchange(comm, sent, count, received, count, kind, lambda all_: all_[root])

    def ncclCommAbort(self, comm: int) -> int:
        self._groups[comm // _MAX_SIZE - 1].abort()
        self.abort_returns.wait(_WAIT_S)
        return 0

    def ncclGetErrorString(self, status: int) -> bytes:
        return b"the group was aborted"

    def _exchange(
        self, comm: int, sent: int, count: int, received: int, total: int, kind: int, join: Any
    ) -> int:
        number, rank = divmod(comm, _MAX_SIZE)
        all_ = self._groups[number - 1].exchange(rank, _memory(sent, count, kind).copy())
        if all_ is None:
            return 1
        _memory(received, total, kind)[:] = join(all_)
        return 0


class _Group:
    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[np.ndarray] = [np.empty(0)] * size

    def meet(self) -> int:
        try:
            self._barrier.wait(_WAIT_S)
        except threading.BrokenBarrierError:
            return 1
        return 0

    def exchange(self, rank: int, part: np.ndarray) -> list[np.ndarray] | None:
        """Returns what all ranks have given; None if one is lost."""
        self._given[rank] = part
        if self.meet():
            return None
        all_ = list(self._given)
        return None if self.meet() else all_

    def abort(self) -> None:
        self._barrier.abort()


def _memory(place: int, count: int, kind: int) -> np.ndarray:
    dtype = np.dtype(_TYPES[kind])
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(place)
    return np.frombuffer(buffer, dtype)
