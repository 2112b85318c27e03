"""Staging segments: host memory that objects pass through between the pool and a backend.

All segments are allocated once and reused. On a CUDA machine they are pinned, so that copies to
and from the pool run at full speed.
"""

import torch

from kernels import fresh_zeros
from kvstore.codec import HEADER_BYTES
from kvstore.layout import KvLayout
from kvstore.mover.pool_objects import view_blocks
from kvstore.store import KvObject

__all__ = ["Segment", "StagingBuffers", "slots_per_segment", "staging_bytes"]

# Stores move values of 1 to 4 MiB best, and a segment holds one call's worth. Headers are not
# counted, because the size of an object's payload is often a power of two.
_SEGMENT_BYTES = 4 << 20
# Each slot is some objects of Python, which tiny blocks would multiply at every start.
_MAX_SLOTS = 256
_NUM_SEGMENTS = 8


def slots_per_segment(layout: KvLayout) -> int:
    """Returns how many objects fit a segment; an object larger than one has one to itself."""
    return min(_MAX_SLOTS, max(1, _SEGMENT_BYTES // layout.block_bytes))


def staging_bytes(layout: KvLayout) -> int:
    """Returns the size of all segments for objects of a layout."""
    return _NUM_SEGMENTS * slots_per_segment(layout) * (HEADER_BYTES + layout.block_bytes)


class Segment:
    """Memory for some objects. Each slot holds one: its header, and behind it its payload.

    Args:
        layout: of an object; see `BlockSlicing.object_layout`.
        pinned: whether a device copies to and from it.
        num_slots: number of slots; None for `slots_per_segment`.

    Attributes:
        frames: the whole memory, `[num_slots, HEADER_BYTES + block_bytes]` uint8. Unless it is
            pinned, its pages are allocated when they are first written.
        payload: the payloads in it, `[num_slots, block_bytes]` uint8.
        object_ids: `[num_slots]` int64: the objects' places in the pool, for copies that read them
            after they were started.
        overflowed: `[1]` bool: set by a copy whose numbers the new type cannot hold; see
            `PoolObjects`.
        num_slots: number of slots.
        slots: each slot's memory.
    """

    def __init__(self, layout: KvLayout, *, pinned: bool, num_slots: int | None = None) -> None:
        self.num_slots = num_slots or slots_per_segment(layout)
        shape = (self.num_slots, HEADER_BYTES + layout.block_bytes)
        if pinned:
            self.frames = torch.zeros(shape, dtype=torch.uint8, pin_memory=True)
        else:
            self.frames = fresh_zeros(shape, torch.uint8)
        self.payload = self.frames[:, HEADER_BYTES:]
        self.object_ids = torch.zeros(self.num_slots, dtype=torch.int64, pin_memory=pinned)
        self.overflowed = torch.zeros(1, dtype=torch.bool, pin_memory=pinned)
        memory = self.frames.view(-1).numpy().data
        self.slots = [
            KvObject.split(memory[start : start + shape[1]], HEADER_BYTES)
            for start in range(0, len(memory), shape[1])
        ]
        self._layout = layout

    def clear_after(self, slot: int, num_tokens: int, layer_group: int = 0) -> None:
        """Zeroes a slot's token positions from `num_tokens` on, with their factors.

        They may hold what an earlier request left in the block, which must not leave the process.

        Args:
            slot: number of the slot.
            num_tokens: tokens that are kept.
            layer_group: the layer group whose KV the slot has.
        """
        layout = self._layout.of_group(layer_group)
        dtype = getattr(torch, layout.pool_dtype)
        block = self.payload[slot].view(dtype).view(layout.block_shape)
        views = view_blocks(block, layout)
        views.states[:, :, :, num_tokens:] = 0
        if views.scales is not None:
            views.scales[:, :, :, num_tokens:] = 0


class StagingBuffers:
    """A fixed set of segments. Not thread-safe: only the engine's thread takes and returns any.

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
