"""`NixlLink`: one nixl agent for the reads from one peer.

nixl releases requests and forgets remotes without stopping what they began. A
remote that was stopped and goes on may then still write. Only destroying the
agent ends everything, so each peer has an agent of its own, and a link whose
read failed once is closed for good.
"""

import contextlib
import ctypes
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
from kvstore.peer.nixl.memory import TOKEN_BYTES, AgentMetadata, DescribedRanges, MemoryMap
from kvstore.peer.transport import RangeTable, TransferError, UnreadablePeerError, make_ranges

__all__ = ["NixlLink"]

# System calls that copy are over before nixl's call returns: the deadline is checked between
# requests of this size.
_PART_BYTES = 32 << 20
_NUM_SPINS = 20
_POLL_S = 1e-4
_CLOSE_S = 5.0

# Buffers of some 16 bytes each that a probe which failed may still write to: they are never freed.
_still_written_to: list[Any] = []


class NixlLink:
    """Reads from one peer, one at a time. Any thread may call it.

    Args:
        nixl: the package.
        peer: metadata of the peer.
        memory: own registered memory; regions may be added later.
    """

    def __init__(self, nixl: ModuleType, peer: AgentMetadata, memory: MemoryMap) -> None:
        self._nixl = nixl
        self._peer = peer
        self._memory = memory
        self._peer_memory = MemoryMap(peer.regions)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        # The agent, the peer's name in it, and the descriptors of own registered regions. Nothing
        # else may refer to the agent: it must end when the link drops it.
        self._agent: Any = None
        self._peer_name = ""
        self._registered: list[Any] = []
        self._is_connected = False

    @property
    def is_lost(self) -> bool:
        """Whether it is closed, or a read failed."""
        return self._is_closed.is_set()

    def connect(self, timeout_s: float) -> None:
        """Makes the agent and reads the peer's known bytes; returns at once if that was done.

        Args:
            timeout_s: longest wait for other links, and again for the bytes.

        Raises:
            UnreadablePeerError: the bytes did not come, or are others.
            TransferError: other links took the time, or this one was closed; settled.
        """
        with self._turn(timeout_s):
            if self._is_connected:
                return
            try:
                self._open(time.monotonic() + timeout_s)
                problem = self._read_probe(time.monotonic() + timeout_s)
            except TimeoutError as error:
                self._end()
                raise TransferError(f"nixl cannot connect: {error}", is_settled=True) from error
            except Exception as error:  # nixl's errors have no base of their own
                problem = str(error) or repr(error)
            was_removed = self.is_lost
            self._is_connected = not problem
            if problem:
                self._end()
        if was_removed:
            raise TransferError("the peer was removed", is_settled=True)
        if problem:
            raise UnreadablePeerError(self._peer.obstacle(), f"nixl READ: {problem}")

    def read(self, theirs: RangeTable, own: RangeTable, timeout_s: float) -> None:
        """Copies ranges of the peer's memory into own ones.

        Args:
            theirs: the peer's ranges.
            own: where to copy them; range by range as long as `theirs`.
            timeout_s: longest wait.

        Raises:
            TransferError: not all bytes arrived.
        """
        give_up_at = time.monotonic() + timeout_s
        targets, sources = self._memory.describe(own), self._peer_memory.describe(theirs)
        if not np.array_equal(targets.table[:, 1], sources.table[:, 1]):
            raise TransferError("sources and targets differ in length", is_settled=True)
        with self._turn(timeout_s):
            problem = self._read_all(sources, targets, give_up_at)
            has_ended = self._end() if problem else True
        if problem:
            # A GPU copies by itself, and may go on when the agent has ended.
            is_on_gpu = bool(sources.is_on_gpu.any() or targets.is_on_gpu.any())
            raise TransferError(f"nixl READ: {problem}", is_settled=has_ended and not is_on_gpu)

    def close(self) -> None:
        """Ends the agent; a read that is under way fails. Idempotent.

        A call of nixl that hangs is not waited for; what it writes is then over after
        `LATE_WRITES_S`.
        """
        self._is_closed.set()
        if self._lock.acquire(timeout=_CLOSE_S):
            try:
                self._end()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _turn(self, timeout_s: float) -> Iterator[None]:
        """Waits for the link's other reads."""
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise TransferError("the peer's other transfers took the time", is_settled=True)
        try:
            if self.is_lost:
                raise TransferError("the peer was given up; add it again", is_settled=True)
            yield
        finally:
            self._lock.release()

    def _open(self, give_up_at: float) -> None:
        """Makes the agent; it connects with its first read."""
        name, left_s = f"baton-link-{uuid4().hex}", give_up_at - time.monotonic()
        self._agent = new_agent(self._nixl, name, with_thread=False, timeout_s=left_s)
        self._register_new()
        self._peer_name = self._agent.add_remote_agent(self._peer.agent)

    def _register_new(self) -> None:
        for region in self._memory.regions[len(self._registered) :]:
            run = (region.address, region.num_bytes, region.device_id, "")
            self._registered.append(self._agent.register_memory([run], region.kind))

    def _read_probe(self, give_up_at: float) -> str:
        """Reads the peer's known bytes, and some of each region on a GPU; returns what failed."""
        on_gpu = [region.address for region in self._peer.regions if region.is_on_gpu]
        addresses = [self._peer.probe_address, *on_gpu]
        landing = ctypes.create_string_buffer(TOKEN_BYTES * len(addresses))
        first = ctypes.addressof(landing)
        run = (first, len(landing), 0, "")
        registered = self._agent.register_memory([run], "DRAM")
        starts = range(first, first + len(landing), TOKEN_BYTES)
        targets = make_ranges(list(starts), TOKEN_BYTES)
        sources = self._peer_memory.describe(make_ranges(addresses, TOKEN_BYTES))
        in_host_memory = np.zeros(len(addresses), np.bool_)
        try:
            problem = self._read_all(sources, DescribedRanges(targets, in_host_memory), give_up_at)
        finally:
            with contextlib.suppress(Exception):  # it ends with the agent
                self._agent.deregister_memory(registered)
        if problem:
            _still_written_to.append(landing)
        elif landing.raw[:TOKEN_BYTES] != self._peer.probe_token:
            problem = "the bytes are those of another process"
        return problem

    def _read_all(
        self, sources: DescribedRanges, targets: DescribedRanges, give_up_at: float
    ) -> str:
        """Reads the ranges, some at a time; returns what failed."""
        for part in _parts(targets, sources):
            lists = (
                (targets.table[part], "VRAM" if targets.is_on_gpu[part[0]] else "DRAM"),
                (sources.table[part], "VRAM" if sources.is_on_gpu[part[0]] else "DRAM"),
            )
            problem = self._read_part(lists, give_up_at)
            if problem:
                return problem
        return ""

    def _read_part(self, lists: Sequence[tuple[NDArray[np.uint64], str]], give_up_at: float) -> str:
        """Makes one request of nixl. Once it returns, no frame refers to the agent."""
        handle = None
        try:
            self._register_new()
            targets, theirs = (self._agent.get_xfer_descs(*described) for described in lists)
            handle = self._agent.initialize_xfer("READ", targets, theirs, self._peer_name)
            return self._wait(handle, self._agent.transfer(handle), give_up_at)
        except Exception as error:  # nixl's errors have no base of their own
            return str(error) or repr(error)  # "" would mean success
        finally:
            if handle is not None:
                with contextlib.suppress(Exception):  # what is not released ends with the agent
                    handle.release()

    def _wait(self, handle: Any, status: str, give_up_at: float) -> str:
        """Polls a request to its end: it makes progress only within these calls."""
        num_polls = 0
        while status == "PROC":
            if self._is_closed.is_set():
                return "the peer was removed"
            if time.monotonic() >= give_up_at:
                return "the time is up"
            num_polls += 1
            if num_polls > _NUM_SPINS:
                time.sleep(_POLL_S)
            status = self._agent.check_xfer_state(handle)
        return "" if status == "DONE" else f"nixl says {status}"

    def _end(self) -> bool:
        """Destroys the agent with all that it had under way; returns whether that succeeded."""
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


def _parts(targets: DescribedRanges, theirs: DescribedRanges) -> Iterator[NDArray[np.int64]]:
    """Yields the indices of the ranges of each request: one kind of memory on either side."""
    kinds = 2 * targets.is_on_gpu + theirs.is_on_gpu
    for kind in set(kinds.tolist()):
        same = (kinds == kind).nonzero()[0]
        ends = targets.table[same, 1].cumsum() // np.uint64(_PART_BYTES)
        yield from np.split(same, (ends[1:] != ends[:-1]).nonzero()[0] + 1)
