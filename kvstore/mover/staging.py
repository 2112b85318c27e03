"""Staging buffers: where objects lie between the pool and a backend.

Allocated once and reused; on a CUDA machine pinned, so that copies to and
from the pool run at full speed.
"""

import torch

from kvstore.block_views import view_blocks
from kvstore.codec import HEADER_BYTES
from kvstore.layout import KvLayout
from kvstore.slot import Slot

__all__ = ["Segment", "StagingBuffers", "slots_per_segment"]

# Stores move values of 1 to 4 MiB best; a segment is one call's worth, headers not counted:
# objects are often a power of two long.
_SEGMENT_BYTES = 4 << 20
_NUM_SEGMENTS = 8


def slots_per_segment(layout: KvLayout) -> int:
    """Objects that one segment holds; one larger than a segment has one to itself."""
    return max(1, _SEGMENT_BYTES // layout.block_bytes)


class Segment:
    """Some slots, each a header and one object.

    Args:
        layout: of an object; see `PoolCut.object_layout`.
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
    """

    def __init__(self, layout: KvLayout, *, pinned: bool, num_slots: int | None = None) -> None:
        self.num_slots = num_slots or slots_per_segment(layout)
        shape = (self.num_slots, HEADER_BYTES + layout.block_bytes)
        self.frames = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
        self.payload = self.frames[:, HEADER_BYTES:]
        self.object_ids = torch.zeros(self.num_slots, dtype=torch.int64, pin_memory=pinned)
        self.overflowed = torch.zeros(1, dtype=torch.bool, pin_memory=pinned)
        whole = self.frames.view(-1).numpy().data
        starts = range(0, len(whole), shape[1])
        self.slots = [Slot.of(whole[start : start + shape[1]]) for start in starts]
        self._layout = layout

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

    Attributes:
        segments: all segments, free or in use.
    """

    def __init__(self, layout: KvLayout, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.segments = tuple(Segment(layout, pinned=pinned) for _ in range(_NUM_SEGMENTS))
        self._free = list(self.segments)

    def take(self) -> Segment | None:
        """Returns a free segment; None while all are in use."""
        return self._free.pop() if self._free else None

    def give_back(self, segment: Segment) -> None:
        """Makes a segment free again."""
        self._free.append(segment)
