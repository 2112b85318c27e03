"""Reads the bytes of lent blocks, for the threads that send them.

    `HostMemory`      a pool in host memory whose blocks are lent as they are: read in place
    `GatheredMemory`  a GPU's pool, or another form: the engine's thread copies blocks into a
                      segment first

A partial tail is lent as a copy, cleared behind its tokens: other requests'
bytes there must not leave the process, and a sequence may still write there.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from kvstore.layout import KvLayout
from kvstore.mover.staging import Segment
from kvstore.peer.leases import BlockRead, LentBlock
from kvstore.store import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.mover.copies import BlockCopier, Copy

__all__ = [
    "CopyRequests",
    "GatheredMemory",
    "HostMemory",
    "LentFrame",
    "LentMemory",
    "TailSlots",
]

LentFrame = tuple[bytes, memoryview]
"""The header of a block, and its bytes."""

# A prompt that waits for decode needs a slot for each object of its tail. Without one it hands over
# its full blocks, and decode computes the tail.
_TAIL_BYTES = 512 << 20
_MIN_TAILS = 16
_MAX_TAILS = 1024


class TailSlots:
    """A fixed number of slots for copies of partial tails. Thread-safe.

    Args:
        layout: layout of an object; see `BlockSlicing.object_layout`.
        num_objects: number of objects in the pool, which bounds the number of tails.
        objects_per_tail: see `BlockSlicing.objects_per_block`.

    Attributes:
        segment: memory of the slots, whose pages are allocated when they are first written. The
            slot that became free last is used next, so memory grows with the tails lent at a time.
    """

    def __init__(self, layout: KvLayout, num_objects: int, objects_per_tail: int = 1) -> None:
        num_tails = _TAIL_BYTES // (layout.block_bytes * objects_per_tail)
        num_tails = min(max(_MIN_TAILS, num_tails), _MAX_TAILS)
        num_slots = min(num_objects, num_tails * objects_per_tail)
        self.segment = Segment(layout, pinned=False, num_slots=num_slots)
        self._free = deque(reversed(range(num_slots)))

    def take(self) -> int | None:
        """Returns a free slot; None while all are in use."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, slots: Sequence[int]) -> None:
        """Makes slots free again."""
        self._free.extend(slots)

    def fill(self, slot: int, block: memoryview, num_tokens: int, layer_group: int) -> None:
        """Copies a block of a layer group into a slot and clears it behind its tokens."""
        self.payload(slot)[:] = block
        self.segment.clear_after(slot, num_tokens, layer_group)

    def payload(self, slot: int) -> memoryview:
        """Returns the bytes of a slot."""
        return self.segment.slots[slot].payload

    def place_of(self, slot: int) -> tuple[int, int]:
        """Returns the address of a slot's bytes, and their number."""
        block = self.segment.payload[slot]
        return block.data_ptr(), block.nbytes


class LentMemory(ABC):
    """Reads blocks that leases hold. Any thread may call it.

    Args:
        tails: slots with the copies of tails.
    """

    def __init__(self, tails: TailSlots) -> None:
        self.tails = tails

    @abstractmethod
    def frames(self, read: BlockRead, timeout_s: float) -> Iterator[list[LentFrame]]:
        """Yields the frames of a read's blocks, some at a time.

        The caller copies bytes within `read.copying()`, and those of one list before it takes the
        next.

        Raises:
            StoreUnavailableError: the blocks were not copied in time.
        """


class HostMemory(LentMemory):
    """Blocks of a pool in host memory, which are lent as they are.

    Args:
        pool: `[num_blocks, ...]`, contiguous; its blocks are the objects.
        tails: slots with the copies of tails.
    """

    def __init__(self, pool: torch.Tensor, tails: TailSlots) -> None:
        super().__init__(tails)
        self._blocks = pool.view(torch.uint8).view(len(pool), -1).numpy()

    def block(self, object_id: int) -> memoryview:
        """Returns a view of a block of the pool."""
        return memoryview(self._blocks[object_id])

    @override
    def frames(self, read: BlockRead, timeout_s: float) -> Iterator[list[LentFrame]]:
        if read.blocks:
            yield [(block.header, self.payload(block)) for block in read.blocks]

    def payload(self, block: LentBlock) -> memoryview:
        """Returns a view of the lent bytes."""
        if block.tail_slot is not None:
            return self.tails.payload(block.tail_slot)
        return self.block(block.object_id)


class CopyRequests:
    """Requests of other threads to the engine's thread, which alone may copy out of the pool.

    Args:
        wake: called when a copy is requested.
    """

    def __init__(self, wake: "Callable[[], None]") -> None:
        self._wake = wake
        self._open: deque[tuple[Future[Copy | None], Sequence[int], Segment]] = deque()
        self._is_closed = threading.Event()

    def gather(self, object_ids: Sequence[int], segment: Segment, timeout_s: float) -> None:
        """Has blocks copied into a segment; when it returns or raises, nothing writes there.

        Raises:
            StoreUnavailableError: the engine's thread did not start the copy in time.
        """
        requested: Future[Copy | None] = Future()
        self._open.append((requested, object_ids, segment))
        if self._is_closed.is_set():
            self.close()
        self._wake()
        try:
            copy = requested.result(timeout_s)
        except FutureTimeoutError:
            if requested.cancel():
                raise StoreUnavailableError("the engine did not copy blocks in time") from None
            copy = requested.result()  # it has just begun
        except CancelledError:
            raise StoreUnavailableError("the engine is closing") from None
        if copy is not None:
            copy.wait()

    def start_copies(self, copier: "BlockCopier") -> None:
        """Starts the copies that were requested. Engine thread only."""
        while self._open:
            requested, object_ids, segment = self._open.popleft()
            if not requested.set_running_or_notify_cancel():
                continue
            try:
                requested.set_result(copier.gather(object_ids, segment))
            except Exception as error:  # raised in the thread that waits
                requested.set_exception(error)

    def close(self) -> None:
        """Refuses all requests, open and future ones. Idempotent."""
        self._is_closed.set()
        while self._open:
            self._open.popleft()[0].cancel()


class GatheredMemory(LentMemory):
    """Blocks that must be copied before a thread can read them.

    Args:
        copies: has the engine's thread copy blocks.
        segments: memory for the copies, as many as run at a time.
        tails: slots with the copies of tails.
    """

    def __init__(self, copies: CopyRequests, segments: Sequence[Segment], tails: TailSlots) -> None:
        super().__init__(tails)
        self._copies = copies
        self._free = list(segments)
        self._num_slots = segments[0].num_slots
        self._num_free = threading.Semaphore(len(self._free))

    @override
    def frames(self, read: BlockRead, timeout_s: float) -> Iterator[list[LentFrame]]:
        for first in range(0, len(read.blocks), self._num_slots):
            blocks = read.blocks[first : first + self._num_slots]
            whole = iter(self._gather([b for b in blocks if b.tail_slot is None], timeout_s))
            yield [
                (
                    block.header,
                    next(whole) if block.tail_slot is None else self.tails.payload(block.tail_slot),
                )
                for block in blocks
            ]

    def _gather(self, blocks: Sequence[LentBlock], timeout_s: float) -> list[memoryview]:
        """Returns copies of blocks, made from copies in a segment.

        A reader that is slow to take them must not keep the segment from others.
        """
        if not blocks:
            return []
        if not self._num_free.acquire(timeout=timeout_s):
            raise StoreUnavailableError("too many reads at a time")
        segment = self._free.pop()
        try:
            self._copies.gather([block.object_id for block in blocks], segment, timeout_s)
            slots = segment.slots[: len(blocks)]
            return [memoryview(bytes(slot.payload)) for slot in slots]
        finally:
            self._free.append(segment)
            self._num_free.release()
