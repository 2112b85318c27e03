"""Staging buffers: where blocks lie between the pool and a store.

Allocated once and reused; on a CUDA machine pinned, so that copies to and
from the pool run at full speed.
"""

from collections.abc import Sequence

import torch

from kernels import gather_blocks, scatter_blocks
from kvstore.block_views import view_blocks
from kvstore.codec import HEADER_BYTES
from kvstore.layout import KvLayout

__all__ = ["Segment", "StagingBuffers"]

# Stores move values of 1 to 4 MiB best; a segment is one call's worth.
_SEGMENT_BYTES = 4 << 20
_NUM_SEGMENTS = 8


class Segment:
    """Some slots, each a header and one block: `[num_slots, HEADER_BYTES + block_bytes]`.

    Attributes:
        num_slots: blocks that fit.
        slots: each slot's bytes, as stores and codec take them.
    """

    def __init__(self, layout: KvLayout, num_slots: int, *, pinned: bool) -> None:
        shape = (num_slots, HEADER_BYTES + layout.block_bytes)
        self._bytes = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
        self._payload = self._bytes[:, HEADER_BYTES:]  # [num_slots, block_bytes]
        self._layout = layout
        self.num_slots = num_slots
        self.slots = [memoryview(slot.numpy()) for slot in self._bytes]

    def gather(self, pool: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Copies blocks of the pool into the first slots."""
        gather_blocks(pool, block_ids, self._payload[: len(block_ids)])

    def scatter(self, pool: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Copies the first slots into blocks of the pool."""
        scatter_blocks(self._payload[: len(block_ids)], pool, block_ids)

    def clear_after(self, slot: int, num_tokens: int) -> None:
        """Zeroes a slot's token positions from `num_tokens` on, with their factors.

        What an earlier request left in them must not leave this process.
        """
        dtype = getattr(torch, self._layout.pool_dtype)
        block = self._payload[slot].view(dtype).view(self._layout.block_shape)
        views = view_blocks(block, self._layout)
        views.states[:, :, :, num_tokens:] = 0
        if views.scales is not None:
            views.scales[:, :, :, num_tokens:] = 0


class StagingBuffers:
    """A fixed set of segments. Not thread-safe: the engine's thread takes and gives back."""

    def __init__(self, layout: KvLayout, device: torch.device) -> None:
        num_slots = max(1, _SEGMENT_BYTES // (HEADER_BYTES + layout.block_bytes))
        pinned = device.type == "cuda"
        self._free = [Segment(layout, num_slots, pinned=pinned) for _ in range(_NUM_SEGMENTS)]

    def take(self) -> Segment | None:
        """A free segment; None while all are in use."""
        return self._free.pop() if self._free else None

    def give_back(self, segment: Segment) -> None:
        """Makes a segment free again."""
        self._free.append(segment)
