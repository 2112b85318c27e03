"""Staging buffers: where objects lie between the pool and a backend.

Allocated once and reused; on a CUDA machine pinned, so that copies to and
from the pool run at full speed.

Peers write to segments. Where one may do so later than it should, the segment
is in quarantine for a while, and then *doubtful*: it is used again, but what is
fetched into it is moved to private memory before anybody looks at it.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvstore.block_views import view_blocks
from kvstore.codec import HEADER_BYTES
from kvstore.layout import KvLayout
from kvstore.quarantine import Quarantine
from kvstore.store import KvObject

__all__ = ["Segment", "StagingBuffers", "slots_per_segment"]

# Stores move values of 1 to 4 MiB best; a segment is one call's worth, headers not counted:
# objects are often a power of two long.
_SEGMENT_BYTES = 4 << 20
_NUM_SEGMENTS = 8

_logger = logging.getLogger("baton.kvstore")


def slots_per_segment(layout: KvLayout) -> int:
    """Objects that one segment holds; one larger than a segment has one to itself."""
    return max(1, _SEGMENT_BYTES // layout.block_bytes)


class Segment:
    """Some slots, each a header and one object.

    Args:
        layout: of an object; see `BlockSlicing.object_layout`.
        pinned: for a device's copies.
        num_slots: objects that shall fit; None: one call's worth.

    Attributes:
        frames: the slots, `[num_slots, HEADER_BYTES + block_bytes]` uint8.
        payload: the objects in them, `[num_slots, block_bytes]` uint8.
        object_ids: `[num_slots]` int64: room for the objects' places in the pool, for copies that
            read them after their start.
        overflowed: `[1]` bool: room for what a copy tells at its end; see `PoolObjects`.
        num_slots: objects that fit.
        slots: each slot's memory, in one run.
        is_doubtful: whether somebody may write to it at any time; once it is, it stays so.
    """

    def __init__(self, layout: KvLayout, *, pinned: bool, num_slots: int | None = None) -> None:
        self.num_slots = num_slots or slots_per_segment(layout)
        shape = (self.num_slots, HEADER_BYTES + layout.block_bytes)
        self.frames = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
        self.payload = self.frames[:, HEADER_BYTES:]
        self.object_ids = torch.zeros(self.num_slots, dtype=torch.int64, pin_memory=pinned)
        self.overflowed = torch.zeros(1, dtype=torch.bool, pin_memory=pinned)
        whole = self.frames.view(-1).numpy().data
        self.slots = [
            KvObject.split(whole[start : start + shape[1]], HEADER_BYTES)
            for start in range(0, len(whole), shape[1])
        ]
        self.is_doubtful = False
        self._layout = layout
        self._pinned = pinned
        self._private: Segment | None = None

    @property
    def trusted(self) -> "Segment":
        """Where bytes stay as they were put: here, or if it is doubtful in a segment like it that
        no peer knows, made when it is needed.
        """
        if not self.is_doubtful:
            return self
        if self._private is None:
            self._private = Segment(self._layout, pinned=self._pinned, num_slots=self.num_slots)
        return self._private

    def secure(self, num_slots: int) -> None:
        """Brings what was fetched into the first slots to where it is trusted."""
        if self.is_doubtful:
            np.copyto(self.trusted.frames.numpy()[:num_slots], self.frames.numpy()[:num_slots])

    def clear_after(self, slot: int, num_tokens: int) -> None:
        """Zeroes a slot's token positions from `num_tokens` on, with their factors.

        What an earlier request left in them must not leave this process.
        """
        dtype = getattr(torch, self._layout.pool_dtype)
        block = self.payload[slot].view(dtype).view(self._layout.block_shape)
        views = view_blocks(block, self._layout)
        views.states[:, :, :, num_tokens:] = 0
        if views.scales is not None:
            views.scales[:, :, :, num_tokens:] = 0


class StagingBuffers:
    """A fixed set of segments. Not thread-safe: the engine's thread takes and gives back.

    Args:
        layout: of an object.
        device: of the pool.
        clock: seconds, monotonic.

    Attributes:
        segments: all of them that peers may know.
    """

    def __init__(
        self,
        layout: KvLayout,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_segment = partial(Segment, layout, pinned=device.type == "cuda")
        self.segments = tuple(self._new_segment() for _ in range(_NUM_SEGMENTS))
        self._free = list(self.segments)
        self._quarantine: Quarantine[Segment] = Quarantine(clock)
        # For saves while all segments are in quarantine; made when it is needed.
        self._spare: Segment | None = None
        self._is_spare_taken = False

    @property
    def num_quarantined(self) -> int:
        """Segments that somebody may still write to, and nobody uses therefore."""
        return len(self._quarantine)

    @property
    def is_lost(self) -> bool:
        """Whether no segment is free, nor will be when what is under way ends."""
        return len(self._quarantine) == len(self.segments)

    @property
    def is_in_doubt(self) -> bool:
        """Whether somebody may still write to a segment."""
        return self.num_quarantined > 0 or any(segment.is_doubtful for segment in self.segments)

    def take(self) -> Segment | None:
        """A free segment; None while all are in use."""
        self.end_quarantines()
        return self._free.pop() if self._free else None

    def take_for_save(self) -> Segment | None:
        """As `take`; while that `is_lost`, one that no peer knows."""
        segment = self.take()
        if segment is not None or not self.is_lost or self._is_spare_taken:
            return segment
        self._spare = self._spare or self._new_segment()
        self._is_spare_taken = True
        return self._spare

    def give_back(self, segment: Segment) -> None:
        """Makes a segment free again."""
        if segment is self._spare:
            self._is_spare_taken = False
        elif segment.is_doubtful:
            self._free.insert(0, segment)  # taken last: it costs a copy
        else:
            self._free.append(segment)

    def quarantine(self, segment: Segment, has_settled: Callable[[], bool]) -> None:
        """As `give_back`, but nobody gets the segment before `has_settled` says so, or for long.

        In the second case it is doubtful from then on.
        """
        self._quarantine.add(segment, has_settled)
        if self.is_lost:
            _logger.warning(
                "KV loads fail for a while: peers that do not answer may write to all buffers"
            )

    def end_quarantines(self) -> None:
        """Makes segments free whose quarantine is over."""
        settled, doubtful = self._quarantine.take_over()
        for segment in doubtful:
            segment.is_doubtful = True
        for segment in settled + doubtful:
            self.give_back(segment)
        if doubtful:
            _logger.warning(
                "%d KV buffers are used again that a silent peer may write to: what comes in them "
                "is copied before it is verified",
                len(doubtful),
            )
