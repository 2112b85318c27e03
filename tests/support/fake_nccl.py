"""`FakeNccl`: NCCL's functions for ranks that are threads of one process and compute on the CPU."""

import ctypes
import threading
from typing import Any

import numpy as np

_TYPES = {4: np.int64, 7: np.float32}
_WAIT_S = 60


class FakeNccl:
    """Adds up, joins and copies memory. Ranks that wait for one that is lost fail when it aborts.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = threading.Barrier(size)
        self._given: dict[int, np.ndarray] = {}

    def ncclGetUniqueId(self, name: Any) -> int:
        name._obj.internal = b"an id"
        return 0

    def ncclCommInitRank(self, comm: Any, size: int, name: Any, rank: int) -> int:
        assert size == self._size
        assert name.internal == b"an id"
        comm._obj.value = rank + 1
        return self._meet()

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
        self._barrier.abort()
        return 0

    def ncclGetErrorString(self, status: int) -> bytes:
        return b"the group was aborted"

    def _exchange(
        self, comm: int, sent: int, count: int, received: int, total: int, kind: int, join: Any
    ) -> int:
        self._given[comm] = _memory(sent, count, kind).copy()
        if status := self._meet():
            return status
        joined = join([self._given[rank + 1] for rank in range(self._size)])
        if status := self._meet():
            return status
        _memory(received, total, kind)[:] = joined
        return 0

    def _meet(self) -> int:
        try:
            self._barrier.wait(_WAIT_S)
        except threading.BrokenBarrierError:
            return 1
        return 0


def _memory(place: int, count: int, kind: int) -> np.ndarray:
    dtype = np.dtype(_TYPES[kind])
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(place)
    return np.frombuffer(buffer, dtype)
