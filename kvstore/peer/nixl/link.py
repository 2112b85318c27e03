"""`NixlLink`: an agent of its own for the transfers that go to one peer.

Whatever cannot be stopped ends with the agent: nixl releases handles and
forgets remotes without stopping what they began, and a remote that was stopped
and goes on then still writes. So a link that fails once is closed for good.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvstore.peer.nixl.library import new_agent
from kvstore.peer.nixl.memory import AgentMetadata, DescribedRanges, MemoryMap
from kvstore.peer.transport import RangeTable, TransferError

__all__ = ["NixlLink"]

# What is copied by system calls is over before nixl's call returns: between two parts there is
# time to look at the clock.
_PART_BYTES = 32 << 20
_NUM_SPINS = 20
_POLL_S = 1e-4
_CLOSE_S = 5.0


class NixlLink:
    """Transfers with one peer, one at a time. Any thread may call it.

    To make one costs nothing; its first transfer makes the agent and connects.

    Args:
        nixl: the package.
        peer: what the peer says of itself.
        memory: own registered memory; it may grow.

    Attributes:
        is_copied_by_kernel: whether transfers are over when their calls are.
        process_end: of the peer; None where that cannot be seen.
    """

    def __init__(self, nixl: ModuleType, peer: AgentMetadata, memory: MemoryMap) -> None:
        self._nixl = nixl
        self._peer = peer
        self._memory = memory
        self._peer_memory = MemoryMap(peer.regions)
        self.is_copied_by_kernel = peer.is_copied_by_kernel()
        self.process_end = peer.process_end()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        # The agent, the peer's name with it, and the descriptors of its registered regions. No
        # other name may keep the agent: it must end when the link drops it.
        self._agent: Any = None
        self._peer_name = ""
        self._registered: list[Any] = []

    @property
    def is_lost(self) -> bool:
        """Whether it is closed, or failed once."""
        return self._is_closed.is_set()

    def transfer(
        self, operation: str, own: RangeTable, theirs: RangeTable, timeout_s: float
    ) -> None:
        """Moves bytes between own ranges and the peer's.

        Args:
            operation: "READ" or "WRITE".
            own: ranges of own memory.
            theirs: the peer's, one to one with the own ones.
            timeout_s: longest wait.

        Raises:
            TransferError: not all bytes arrived.
        """
        give_up_at = time.monotonic() + timeout_s
        pairs = self._memory.describe(own), self._peer_memory.describe(theirs)
        if not np.array_equal(pairs[0].table[:, 1], pairs[1].table[:, 1]):
            raise TransferError("sources and targets differ in length", is_settled=True)
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise TransferError("the peer's other transfers took the time", is_settled=True)
        try:
            if self.is_lost:
                raise TransferError("the peer was given up; add it again", is_settled=True)
            self._open(give_up_at)
            problem = self._move_all(operation, *pairs, give_up_at)
            is_over = self._end() if problem else True
        finally:
            self._lock.release()
        if problem:
            is_settled = is_over and self._ends_with_agent(operation, *pairs)
            message = f"nixl {operation}: {problem}{self._hint(operation)}"
            raise TransferError(message, is_settled=is_settled)

    def close(self) -> bool:
        """Ends the agent; a transfer that is under way fails. Idempotent.

        Returns:
            Whether the agent has ended: a call of nixl's that hangs is not waited for.
        """
        self._is_closed.set()
        if not self._lock.acquire(timeout=_CLOSE_S):
            return False
        try:
            return self._end()
        finally:
            self._lock.release()

    def _open(self, give_up_at: float) -> None:
        """Makes the agent, once. It connects as bytes are to move."""
        if self._agent is not None:
            return
        try:
            name, left_s = f"baton-link-{uuid4().hex}", give_up_at - time.monotonic()
            self._agent = new_agent(self._nixl, name, with_thread=False, timeout_s=left_s)
            self._register_new()
            self._peer_name = self._agent.add_remote_agent(self._peer.agent)
        except Exception as error:  # nixl's errors have no base of their own
            self._end()
            raise TransferError(f"nixl cannot connect: {error}", is_settled=True) from error

    def _register_new(self) -> None:
        for region in self._memory.regions[len(self._registered) :]:
            run = (region.address, region.num_bytes, region.device_id, "")
            self._registered.append(self._agent.register_memory([run], region.kind))

    def _move_all(
        self, operation: str, own: DescribedRanges, theirs: DescribedRanges, give_up_at: float
    ) -> str:
        """Moves the ranges, some at a time; returns what went wrong."""
        for part in _parts(own, theirs):
            lists = (
                (own.table[part], "VRAM" if own.is_on_gpu[part[0]] else "DRAM"),
                (theirs.table[part], "VRAM" if theirs.is_on_gpu[part[0]] else "DRAM"),
            )
            problem = self._move(operation, lists, give_up_at)
            if problem:
                return problem
        return ""

    def _move(
        self, operation: str, lists: Sequence[tuple[NDArray[np.uint64], str]], give_up_at: float
    ) -> str:
        """One request of nixl's. Once it returns, no frame refers to the agent."""
        handle = None
        try:
            self._register_new()
            own, theirs = (self._agent.get_xfer_descs(*described) for described in lists)
            handle = self._agent.initialize_xfer(operation, own, theirs, self._peer_name)
            return self._wait(handle, self._agent.transfer(handle), give_up_at)
        except Exception as error:  # nixl's errors have no base of their own
            return str(error) or repr(error)  # "" would mean that all is well
        finally:
            if handle is not None:
                with contextlib.suppress(Exception):  # what is not released ends with the agent
                    handle.release()

    def _wait(self, handle: Any, status: str, give_up_at: float) -> str:
        """Drives a request to its end. No thread does: nothing moves between two looks."""
        num_looks = 0
        while status == "PROC":
            if self._is_closed.is_set():
                return "the peer was removed"
            if time.monotonic() >= give_up_at:
                return "the time is up"
            num_looks += 1
            if num_looks > _NUM_SPINS:
                time.sleep(_POLL_S)
            status = self._agent.check_xfer_state(handle)
        return "" if status == "DONE" else f"nixl says {status}"

    def _end(self) -> bool:
        """Destroys the agent, with all that it had under way; whether that succeeded."""
        self._is_closed.set()
        if self._agent is None:
            return True
        native = weakref.ref(self._agent.agent)
        with contextlib.suppress(Exception):  # a connection that failed cannot be ended once more
            if self._peer_name:
                self._agent.remove_remote_agent(self._peer_name)
        for registered in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registered)
        self._registered.clear()
        self._agent = None
        return native() is None

    def _hint(self, operation: str) -> str:
        if operation == "WRITE" or self.is_copied_by_kernel:
            return ""
        return " (reading takes a shared kernel or RDMA; without, use mode=push)"

    def _ends_with_agent(
        self, operation: str, own: DescribedRanges, theirs: DescribedRanges
    ) -> bool:
        """Whether without the agent nothing writes to the targets any more."""
        if own.is_on_gpu.any() or theirs.is_on_gpu.any():
            return False  # a GPU copies on its own
        return operation == "READ" or self.is_copied_by_kernel


def _parts(own: DescribedRanges, theirs: DescribedRanges) -> Iterator[NDArray[np.int64]]:
    """Indices of the ranges that go into one request each: of one kind on either side."""
    kinds = 2 * own.is_on_gpu + theirs.is_on_gpu
    for kind in set(kinds.tolist()):
        same = (kinds == kind).nonzero()[0]
        ends = own.table[same, 1].cumsum() // np.uint64(_PART_BYTES)
        yield from np.split(same, (ends[1:] != ends[:-1]).nonzero()[0] + 1)
