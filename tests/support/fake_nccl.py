"""`FakeNccl`: NCCL's functions for ranks that are threads of one process and compute on the CPU."""

import ctypes
import threading
from typing import Any

import numpy as np

_TYPES = {4: np.int64, 7: np.float32}
_WAIT_S = 60
_Call = tuple[str, int, int]  # the function, the number of elements, and their type
_MAX_SIZE = 100  # of a group; handles number groups and ranks


class FakeNccl:
    """Adds up, joins and copies memory. Ranks that wait for one that is lost fail when it aborts.

    All ranks of a group must make the same calls in the same order: NCCL matches them by order
    alone, and hangs or mixes memory up where they differ.

    Args:
        size: number of ranks of each group.

    Attributes:
        abort_returns: `ncclCommAbort` returns once it is set, as it is at first.
        differences: calls of the ranks of a group that met and were not the same.
        num_calls: calls that were the same on all ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.abort_returns = threading.Event()
        self.abort_returns.set()
        self.differences: list[tuple[Any, ...]] = []
        self.num_calls = 0
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
        call = "all reduce", count, kind
        return self._exchange(comm, call, sent, received, count, lambda all_: sum(all_))

    def ncclAllGather(
        self, sent: int, received: int, count: int, kind: int, comm: int, _: int
    ) -> int:
        call = "all gather", count, kind
        return self._exchange(comm, call, sent, received, count * self._size, np.concatenate)

    def ncclBroadcast(
        self, sent: int, received: int, count: int, kind: int, root: int, comm: int, _: int
    ) -> int:
        call = f"broadcast from {root}", count, kind
        return self._exchange(comm, call, sent, received, count, lambda all_: all_[root])

    def ncclCommAbort(self, comm: int) -> int:
        self._groups[comm // _MAX_SIZE - 1].abort()
        self.abort_returns.wait(_WAIT_S)
        return 0

    def ncclGetErrorString(self, status: int) -> bytes:
        return b"the group was aborted"

    def _exchange(
        self, comm: int, call: _Call, sent: int, received: int, total: int, join: Any
    ) -> int:
        number, rank = divmod(comm, _MAX_SIZE)
        _, count, kind = call
        all_ = self._groups[number - 1].exchange(rank, call, _memory(sent, count, kind).copy())
        if all_ is None:
            return 1
        calls = [of_rank for of_rank, _ in all_]
        if set(calls) != {call}:
            self.differences.append(tuple(calls))
            return 1
        self.num_calls += rank == 0
        _memory(received, total, kind)[:] = join([part for _, part in all_])
        return 0


class _Group:
    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[tuple[_Call, np.ndarray]] = [(("", 0, 0), np.empty(0))] * size

    def meet(self) -> int:
        try:
            self._barrier.wait(_WAIT_S)
        except threading.BrokenBarrierError:
            return 1
        return 0

    def exchange(
        self, rank: int, call: _Call, part: np.ndarray
    ) -> list[tuple[_Call, np.ndarray]] | None:
        """Returns the calls of all ranks and what each has given; None if one is lost."""
        self._given[rank] = call, part
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
