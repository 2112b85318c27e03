"""`LentRanges`: where lent blocks lie in registered memory, for transports to reach them."""

from collections.abc import Iterable, Sequence

import torch

from baton.v1 import kv_peer_pb2 as pb
from kvstore.peer.leases import LentBlock
from kvstore.peer.lent_memory import TailSlots
from kvstore.peer.transport import MemoryRange, PeerTransport
from kvstore.transfer_form import PoolCut, object_runs

__all__ = ["LentRanges", "from_protos", "split_ranges", "to_protos"]


class LentRanges:
    """The pool and the tails' slots, as a transport knows them.

    Args:
        pool: `[num_blocks, *cut.layout.block_shape]`, contiguous, on any device.
        cut: how it is cut into objects.
        tails: where copies of tails lie.
        transport: what the memory is registered with.
    """

    def __init__(
        self, pool: torch.Tensor, cut: PoolCut, tails: TailSlots, transport: PeerTransport
    ) -> None:
        self._cut = cut
        self._tails = tails
        self._address = pool.data_ptr()
        self._device_id = pool.device.index or 0
        transport.register(self._address, pool.nbytes, device=str(pool.device))
        frames = tails.segment.frames
        transport.register(frames.data_ptr(), frames.nbytes, device="cpu")

    def of_blocks(self, blocks: Iterable[LentBlock]) -> list[tuple[MemoryRange, ...]]:
        """The ranges that each block consists of, in order; empty for one whose bytes in the
        pool are of another type.
        """
        return [self._of_block(block) for block in blocks]

    def _of_block(self, block: LentBlock) -> tuple[MemoryRange, ...]:
        if block.tail_slot is not None:
            return (self._tails.range_of(block.tail_slot),)
        runs = object_runs(self._cut, block.object_id)
        if runs is None:
            return ()
        block_id, pieces = runs
        start = self._address + block_id * self._cut.layout.block_bytes
        return tuple(
            MemoryRange(start + offset, num_bytes, self._device_id) for offset, num_bytes in pieces
        )


def split_ranges(
    blocks: Sequence[Sequence[MemoryRange]], wholes: Sequence[MemoryRange]
) -> tuple[list[MemoryRange], list[MemoryRange]]:
    """Pairs what blocks consist of with the parts of what each is as a whole elsewhere.

    Args:
        blocks: the ranges of each block.
        wholes: a range for each block, as long as its ranges together.

    Returns:
        The ranges of all blocks, and as many parts of `wholes`.

    Raises:
        ValueError: a block is of another length.
    """
    pieces, parts = [], []
    for ranges, whole in zip(blocks, wholes, strict=True):
        if sum(piece.num_bytes for piece in ranges) != whole.num_bytes:
            raise ValueError(f"a block has not {whole.num_bytes} bytes")
        address = whole.address
        for piece in ranges:
            pieces.append(piece)
            parts.append(MemoryRange(address, piece.num_bytes, whole.device_id))
            address += piece.num_bytes
    return pieces, parts


def to_protos(ranges: Iterable[MemoryRange]) -> list[pb.KvMemoryRange]:
    """Ranges on the wire."""
    return [
        pb.KvMemoryRange(address=r.address, num_bytes=r.num_bytes, device_id=r.device_id)
        for r in ranges
    ]


def from_protos(ranges: Iterable[pb.KvMemoryRange]) -> list[MemoryRange]:
    """Ranges from the wire."""
    return [MemoryRange(r.address, r.num_bytes, r.device_id) for r in ranges]
