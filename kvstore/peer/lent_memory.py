"""Where the bytes of lent blocks are, for the threads that send them.

    host pool, blocks as they go      read where they lie
    a device's pool, or another form  gathered into a segment first, by the engine's thread

A partial tail is lent as a copy, cleared behind its tokens: what lies there
must not leave the process, and may still be somebody's.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

import torch

from kvstore.layout import KvLayout
from kvstore.mover.staging import Segment
from kvstore.peer.leases import BlockRead, LentBlock
from kvstore.store import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.mover.copies import BlockCopier, Copy

__all__ = [
    "GatherDesk",
    "GatheredMemory",
    "HostMemory",
    "LentFrame",
    "LentMemory",
    "TailSlots",
]

LentFrame = tuple[bytes, memoryview]
"""A block's header, and its bytes."""

_TAIL_BYTES = 128 << 20
_LEAST_TAILS = 16


class TailSlots:
    """A fixed number of slots for copies of partial tails. Thread-safe.

    Args:
        layout: of an object; see `BlockSlicing.object_layout`.
        num_objects: of the pool; there are never more tails than that.

    Attributes:
        segment: the slots' memory; the system gives pages as they are first written.
    """

    def __init__(self, layout: KvLayout, num_objects: int) -> None:
        num_slots = min(num_objects, max(_LEAST_TAILS, _TAIL_BYTES // layout.block_bytes))
        self.segment = Segment(layout, pinned=False, num_slots=num_slots)
        self._free = deque(range(num_slots))

    def take(self) -> int | None:
        """A free slot; None while all are in use."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give_back(self, slots: Sequence[int]) -> None:
        """Makes slots free again."""
        self._free.extend(slots)

    def fill(self, slot: int, block: memoryview, num_tokens: int) -> None:
        """Copies a block into a slot and clears it behind its tokens."""
        self.payload(slot)[:] = block
        self.segment.clear_after(slot, num_tokens)

    def payload(self, slot: int) -> memoryview:
        """A slot's bytes."""
        return self.segment.slots[slot].payload

    def place_of(self, slot: int) -> tuple[int, int]:
        """The address of a slot's bytes, and how many they are."""
        block = self.segment.payload[slot]
        return block.data_ptr(), block.nbytes


class LentMemory(ABC):
    """Reads blocks that leases hold. Any thread may call it.

    Args:
        tails: where copies of tails lie.
    """

    def __init__(self, tails: TailSlots) -> None:
        self.tails = tails

    @abstractmethod
    def frames(self, read: BlockRead, timeout_s: float) -> Iterator[list[LentFrame]]:
        """The frames of a read's blocks, some at a time.

        Bytes are to be copied within `read.copying()`, and those of one list before the next
        is asked for.

        Raises:
            StoreUnavailableError: they cannot be had in time.
        """


class HostMemory(LentMemory):
    """Blocks of a pool in host memory, as they go to others.

    Args:
        pool: `[num_blocks, ...]`, contiguous; its blocks are the objects.
        tails: where copies of tails lie.
    """

    def __init__(self, pool: torch.Tensor, tails: TailSlots) -> None:
        super().__init__(tails)
        self._blocks = pool.view(torch.uint8).view(len(pool), -1).numpy()

    def block(self, object_id: int) -> memoryview:
        """A block's bytes, where they lie."""
        return memoryview(self._blocks[object_id])

    def frames(self, read: BlockRead, timeout_s: float) -> Iterator[list[LentFrame]]:
        """See `LentMemory.frames`."""
        if read.blocks:
            yield [(block.header, self.payload(block)) for block in read.blocks]

    def payload(self, block: LentBlock) -> memoryview:
        """The bytes that are lent, where they lie."""
        if block.tail_slot is not None:
            return self.tails.payload(block.tail_slot)
        return self.block(block.object_id)


class GatherDesk:
    """Where other threads ask the engine's thread, which alone may copy out of the pool.

    Args:
        wake: called when there is something to do.
    """

    def __init__(self, wake: "Callable[[], None]") -> None:
        self._wake = wake
        self._open: deque[tuple[Future[Copy | None], Sequence[int], Segment]] = deque()
        self._is_closed = threading.Event()

    def gather(self, object_ids: Sequence[int], segment: Segment, timeout_s: float) -> None:
        """Copies blocks into a segment; when it returns or raises, nothing writes there.

        Raises:
            StoreUnavailableError: the engine's thread did not come to it in time.
        """
        asked: Future[Copy | None] = Future()
        self._open.append((asked, object_ids, segment))
        if self._is_closed.is_set():
            self.close()
        self._wake()
        try:
            copy = asked.result(timeout_s)
        except FutureTimeoutError:
            if asked.cancel():
                raise StoreUnavailableError("the engine did not come to copy blocks") from None
            copy = asked.result()  # it has just begun
        except CancelledError:
            raise StoreUnavailableError("the engine is closing") from None
        if copy is not None:
            copy.wait()

    def serve(self, copier: "BlockCopier") -> None:
        """Starts the copies that were asked for. Engine thread only."""
        while self._open:
            asked, object_ids, segment = self._open.popleft()
            if not asked.set_running_or_notify_cancel():
                continue
            try:
                asked.set_result(copier.gather(object_ids, segment))
            except Exception as error:  # told to who asked
                asked.set_exception(error)

    def close(self) -> None:
        """Refuses what is and will be asked. Idempotent."""
        self._is_closed.set()
        while self._open:
            self._open.popleft()[0].cancel()


class GatheredMemory(LentMemory):
    """Blocks that must be copied before a thread can read them.

    Args:
        desk: who copies.
        segments: where to; one for each copy at a time.
        tails: where copies of tails lie.
    """

    def __init__(self, desk: GatherDesk, segments: Sequence[Segment], tails: TailSlots) -> None:
        super().__init__(tails)
        self._desk = desk
        self._free = list(segments)
        self._num_slots = segments[0].num_slots
        self._num_free = threading.Semaphore(len(self._free))

    def frames(self, read: BlockRead, timeout_s: float) -> Iterator[list[LentFrame]]:
        """See `LentMemory.frames`."""
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
        """Copies of blocks. Out of the segment, too: a reader that is slow to take them must not
        keep it from others.
        """
        if not blocks:
            return []
        if not self._num_free.acquire(timeout=timeout_s):
            raise StoreUnavailableError("too many reads at a time")
        segment = self._free.pop()
        try:
            self._desk.gather([block.object_id for block in blocks], segment, timeout_s)
            slots = segment.slots[: len(blocks)]
            return [memoryview(bytes(slot.payload)) for slot in slots]
        finally:
            self._free.append(segment)
            self._num_free.release()
