"""`LeaseTable`: which blocks are lent, and until when. Pure.

A lease begins with its first save. Before it is offered it lasts until its
owner ends it, however long the rest of a prompt takes; afterwards `lease_s`
from the offer or from its last renewal. Readers find its blocks by key until it
ends or runs out. When the last read of them is over, its save jobs are
released, each exactly once. A lease that is over never begins again: later
saves for it lend nothing.

A read has a deadline of its own. Threads copy bytes within
`BlockRead.copying`, which fails past that deadline.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["BlockRead", "LeaseGoneError", "LeaseTable", "LentBlock", "Released"]

# Saves for a lease come while its prompt is computed. By the time that so many other leases have
# ended, no more of them come.
_MAX_ENDED = 16_384


class LeaseGoneError(Exception):
    """The lease is over or was never there, or the read has been cut off."""


@dataclass(frozen=True, slots=True)
class LentBlock:
    """A block that readers may read.

    Attributes:
        key: the key of its object.
        header: the codec's header for its bytes under this key.
        object_id: its place in the pool, as `kvstore.transfer_form.BlockSlicing` numbers them.
        tail_slot: the `TailSlots` slot with the copy that is lent instead; None for the block
            itself.
    """

    key: bytes
    header: bytes
    object_id: int
    tail_slot: int | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """Save jobs whose blocks are read no more, and the slots of their tails."""

    job_ids: tuple[int, ...] = ()
    tail_slots: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Lease:
    expires_at: float = math.inf  # infinite before it is offered
    blocks: dict[bytes, LentBlock] = field(default_factory=dict)
    job_ids: list[int] = field(default_factory=list)
    tail_slots: list[int] = field(default_factory=list)
    num_reads: int = 0  # open reads
    is_over: bool = False


class BlockRead:
    """Blocks that stay where they are until the read is closed or cut off.

    Attributes:
        read_id: id for `LeaseTable.close_read`.
        blocks: the leading lent blocks of the requested list.
        deadline: when the read is cut off.
    """

    def __init__(
        self, read_id: int, lease: _Lease, blocks: list[LentBlock], deadline: float
    ) -> None:
        self.read_id = read_id
        self.blocks = blocks
        self.deadline = deadline
        self._lease = lease
        self._lock = threading.Lock()
        self._is_open = True

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Context in which bytes may be copied out of the blocks. Keep it short: closing waits.

        Raises:
            LeaseGoneError: the read is over.
        """
        with self._lock:
            if not self._is_open:
                raise LeaseGoneError("the read was cut off")
            yield

    def _end(self) -> _Lease:
        with self._lock:
            self._is_open = False
        return self._lease


class LeaseTable:
    """All leases of one process. Any thread may call any method.

    Args:
        lease_s: how long a lease lasts from its offer or its last renewal.
        clock: seconds, monotonic.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}  # leases that can be read and renewed
        self._ended: dict[str, None] = {}  # ids of the last leases that are over
        self._num_expired = 0  # leases since the last `sweep`
        self._saves: dict[int, _Lease] = {}
        self._reads: dict[int, BlockRead] = {}
        self._read_ids = itertools.count(1)
        self._released = Released()
        # Headers of lent blocks, by key and place, and how many leases lend them.
        self._headers: dict[tuple[bytes, int], tuple[bytes, int]] = {}

    # Saves.

    def begin_save(self, lease_id: str, job_id: int) -> None:
        """Notes that a save for a lease is under way. Begins the lease if there is none."""
        with self._lock:
            if lease_id in self._ended:
                lease = _Lease(is_over=True)
            else:
                lease = self._leases.setdefault(lease_id, _Lease())
            self._saves[job_id] = lease

    def known_header(self, key: bytes, object_id: int) -> bytes | None:
        """Returns the header of a block that another lease lends: its bytes are the same."""
        with self._lock:
            header = self._headers.get((key, object_id))
        return None if header is None else header[0]

    def end_save(self, job_id: int, blocks: Sequence[LentBlock] | None) -> bool:
        """Ends a save: lends its blocks unless the lease is over.

        Args:
            job_id: the job, as given to `begin_save`.
            blocks: all blocks of the job; None if it failed.

        Returns:
            Whether the blocks are lent. Then the job is held until it is released.
        """
        with self._lock:
            lease = self._saves.pop(job_id)
            if lease.is_over or blocks is None:
                return False
            lease.job_ids.append(job_id)
            for block in blocks:
                self._lend(lease, block)
            return True

    # Reads.

    def open_read(self, lease_id: str, keys: Sequence[bytes], timeout_s: float) -> BlockRead:
        """Opens a read of the leading lent blocks of a list.

        They stay until `close_read` or the deadline.

        Raises:
            LeaseGoneError: there is no such lease.
        """
        with self._lock:
            lease = self._find(lease_id)
            lent = map(lease.blocks.get, keys)
            blocks = [b for b in itertools.takewhile(lambda block: block is not None, lent) if b]
            read = BlockRead(next(self._read_ids), lease, blocks, self._clock() + timeout_s)
            lease.num_reads += 1
            self._reads[read.read_id] = read
            return read

    def close_read(self, read_id: int) -> None:
        """Ends a read. Unknown ids are ignored."""
        with self._lock:
            self._close_read(read_id)

    # Ends.

    def offer(self, lease_ids: Sequence[str]) -> None:
        """Starts the time of leases that a handoff names now. Unknown ids are ignored."""
        with self._lock:
            for lease_id in lease_ids:
                if (lease := self._leases.get(lease_id)) is not None:
                    lease.expires_at = self._clock() + self._lease_s

    def renew(self, lease_ids: Sequence[str]) -> list[str]:
        """Extends leases whose time has begun; returns those that are over."""
        with self._lock:
            gone = []
            for lease_id in lease_ids:
                try:
                    lease = self._find(lease_id)
                except LeaseGoneError:
                    gone.append(lease_id)
                    continue
                if lease.expires_at < math.inf:
                    lease.expires_at = self._clock() + self._lease_s
            return gone

    def end(self, lease_ids: Sequence[str]) -> None:
        """Ends leases. Unknown ids are ignored."""
        with self._lock:
            for lease_id in lease_ids:
                if lease_id in self._leases:
                    self._end_lease(lease_id)

    def end_all(self) -> None:
        """Ends every lease."""
        with self._lock:
            for lease_id in list(self._leases):
                self._end_lease(lease_id)

    def sweep(self) -> int:
        """Ends leases that have run out, and reads past their deadlines.

        Returns:
            How many leases ran out since the last call.
        """
        with self._lock:
            now = self._clock()
            for read_id in [r.read_id for r in self._reads.values() if r.deadline <= now]:
                self._close_read(read_id)
            expired = [name for name, lease in self._leases.items() if lease.expires_at <= now]
            for lease_id in expired:
                self._end_lease(lease_id)
            num_expired, self._num_expired = self._num_expired + len(expired), 0
            return num_expired

    @property
    def next_deadline(self) -> float | None:
        """When `sweep` is next due: maybe too early, never too late. None if it is not due."""
        with self._lock:
            deadlines = [lease.expires_at for lease in self._leases.values()]
            deadlines += [read.deadline for read in self._reads.values()]
            earliest = min(deadlines, default=math.inf)
            return earliest if earliest < math.inf else None

    @property
    def has_released(self) -> bool:
        """Whether `take_released` would return something."""
        return bool(self._released.job_ids or self._released.tail_slots)

    def take_released(self) -> Released:
        """Returns the jobs and tail slots released since the last call."""
        with self._lock:
            released, self._released = self._released, Released()
            return released

    # The lock is held in what follows.

    def _find(self, lease_id: str) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.expires_at <= self._clock():
            self._num_expired += 1
            self._end_lease(lease_id)
            lease = None
        if lease is None:
            raise LeaseGoneError(f"there is no lease {lease_id!r}")
        return lease

    def _lend(self, lease: _Lease, block: LentBlock) -> None:
        if block.tail_slot is not None:
            lease.tail_slots.append(block.tail_slot)
        if block.key in lease.blocks:
            return  # saved twice for one lease: the first copy is as good
        lease.blocks[block.key] = block
        place = (block.key, block.object_id)
        if block.tail_slot is None:
            _, count = self._headers.get(place, (b"", 0))
            self._headers[place] = (block.header, count + 1)

    def _end_lease(self, lease_id: str) -> None:
        lease = self._leases.pop(lease_id)
        lease.is_over = True
        self._ended[lease_id] = None
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        for block in lease.blocks.values():
            self._forget_header(block)
        lease.blocks.clear()
        self._settle(lease)

    def _forget_header(self, block: LentBlock) -> None:
        place = (block.key, block.object_id)
        if block.tail_slot is None:
            header, count = self._headers.pop(place)
            if count > 1:
                self._headers[place] = (header, count - 1)

    def _close_read(self, read_id: int) -> None:
        read = self._reads.pop(read_id, None)
        if read is not None:
            lease = read._end()
            lease.num_reads -= 1
            self._settle(lease)

    def _settle(self, lease: _Lease) -> None:
        """Releases the jobs of an ended lease once no read of it is open."""
        if lease.is_over and not lease.num_reads:
            self._released = Released(
                (*self._released.job_ids, *lease.job_ids),
                (*self._released.tail_slots, *lease.tail_slots),
            )
            lease.job_ids.clear()
            lease.tail_slots.clear()
