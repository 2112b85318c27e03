"""Locations of lent blocks in registered memory, for transports to read them.

    BlockRanges      the ranges that blocks consist of
    BlockLocations   these and the blocks' headers, as the answer to OpenBlocks
    LentRanges       finds the ranges of this process's own blocks

All are tables: objects for each range would take too long to handle, for a
reader handles hundreds before the first byte moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from baton.v1 import kv_peer_pb2 as pb
from kvstore.codec import HEADER_BYTES
from kvstore.peer.leases import LentBlock
from kvstore.peer.lent_memory import TailSlots
from kvstore.peer.transport import PeerTransport, RangeTable, make_ranges
from kvstore.transfer_form import BlockSlicing, object_runs

__all__ = [
    "BlockLocations",
    "BlockRanges",
    "LentRanges",
    "ranges_from_proto",
    "ranges_to_proto",
]

_NO_RUNS = np.empty((0, 2), np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class BlockRanges:
    """The ranges that blocks consist of.

    Attributes:
        table: the ranges of the first block in order, then those of the second, ...
        counts: `[blocks]` int64: number of ranges of each block; 0 if ReadBlocks alone can read it.

    Raises:
        ValueError: the counts do not add up to the length of the table.
    """

    table: RangeTable
    counts: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.counts.sum() != len(self.table):
            raise ValueError(f"blocks of {self.counts.sum()} ranges, and {len(self.table)} ranges")

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def num_reachable(self) -> int:
        """Number of leading blocks that a transport can read."""
        return int(np.logical_and.accumulate(self.counts > 0).sum())

    def select(self, blocks: Sequence[int]) -> Self:
        """Returns the ranges of some blocks."""
        counts = self.counts[blocks]
        # Each range's place: its block's first one, and how many of the block are before it.
        shifts = (self.counts.cumsum() - self.counts)[blocks] - (counts.cumsum() - counts)
        return type(self)(self.table[shifts.repeat(counts) + np.arange(counts.sum())], counts)

    def parts_of(self, wholes: RangeTable) -> RangeTable:
        """Cuts other ranges, one for each block, into parts as long as the blocks' own ranges.

        Args:
            wholes: where the blocks are copied to, one range for each.

        Raises:
            ValueError: they are not as long as the blocks.
        """
        if len(wholes) != len(self):
            raise ValueError(f"{len(self)} blocks do not fit {len(wholes)} ranges")
        sizes = self.table[:, 1]
        edges = np.insert(sizes.cumsum(), 0, 0)
        ends = self.counts.cumsum()
        begins = edges[ends - self.counts]
        if not np.array_equal(edges[ends] - begins, wholes[:, 1]):
            raise ValueError(f"a block does not have {wholes[0, 1]} bytes")
        parts = wholes.repeat(self.counts, axis=0)
        parts[:, 0] += edges[:-1] - begins.repeat(self.counts)
        parts[:, 1] = sizes
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class BlockLocations:
    """Locations of a peer's blocks.

    Attributes:
        headers: the codec's headers of the blocks, one after the other.
        ranges: the ranges of the blocks' bytes.

    Raises:
        ValueError: there is not one header for each block.
    """

    headers: bytes
    ranges: BlockRanges

    def __post_init__(self) -> None:
        if len(self.headers) != HEADER_BYTES * len(self.ranges):
            raise ValueError(f"{len(self.headers)} bytes of headers of {len(self.ranges)} blocks")

    def __len__(self) -> int:
        return len(self.ranges)

    def select(self, blocks: Sequence[int]) -> Self:
        """Returns the locations of some of the blocks."""
        headers = np.frombuffer(self.headers, np.uint8).reshape(-1, HEADER_BYTES)
        return type(self)(headers[blocks].tobytes(), self.ranges.select(blocks))

    def to_proto(self) -> pb.KvBlockLocations:
        """Returns the wire form."""
        ranges = ranges_to_proto(self.ranges.table)
        counts = self.ranges.counts.tolist()
        return pb.KvBlockLocations(headers=self.headers, num_ranges=counts, ranges=ranges)

    @classmethod
    def from_proto(cls, locations: pb.KvBlockLocations) -> Self:
        """Parses the wire form.

        Raises:
            ValueError: its parts do not fit together.
        """
        counts = np.array(locations.num_ranges, np.int64)
        return cls(locations.headers, BlockRanges(ranges_from_proto(locations.ranges), counts))


class LentRanges:
    """Registers the pool and the slots of tails with a transport, and finds blocks in them.

    Args:
        pool: `[num_blocks, *cut.layout.block_shape]`, contiguous, on any device; slots for states
            lie behind the blocks for tokens.
        cut: how the pool is cut into objects.
        tails: slots with the copies of tails.
        transport: registers the memory.
    """

    def __init__(
        self, pool: torch.Tensor, cut: BlockSlicing, tails: TailSlots, transport: PeerTransport
    ) -> None:
        self._cut = cut
        self._tails = tails
        self._address = pool.data_ptr()
        self._device_id = pool.device.index or 0
        self._block_bytes = cut.layout.block_bytes
        self._objects_per_block = cut.transfer_blocks * cut.objects_per_block
        # Those of blocks for tokens, which are alike in all blocks.
        self._runs = [_runs_of(cut, index)[1] for index in range(self._objects_per_block)]
        transport.register(self._address, pool.nbytes, device=str(pool.device))
        frames = tails.segment.frames
        transport.register(frames.data_ptr(), frames.nbytes, device="cpu")

    def of_blocks(self, blocks: Sequence[LentBlock]) -> BlockRanges:
        """Returns the ranges of each block.

        A block has none if its bytes in the pool are of another type than they are lent in.
        """
        places = [self._of_block(block) for block in blocks]
        counts = np.array([len(runs) for _, _, runs in places], np.int64)
        starts, devices, runs = zip(*places, strict=True) if places else ((), (), ())
        offsets, sizes = np.concatenate(runs or (_NO_RUNS,)).T
        addresses = np.array(starts, np.uint64).repeat(counts) + offsets
        device_ids = np.array(devices, np.uint64).repeat(counts)
        return BlockRanges(make_ranges(addresses, sizes, device_ids), counts)

    def _of_block(self, block: LentBlock) -> tuple[int, int, NDArray[np.uint64]]:
        """Returns the start of a block's memory, its GPU, and the runs in it that are the block."""
        if block.tail_slot is not None:
            address, num_bytes = self._tails.place_of(block.tail_slot)
            return address, 0, np.array([[0, num_bytes]], np.uint64)
        if self._cut.holds_state(block.object_id):
            block_id, runs = _runs_of(self._cut, block.object_id)
        else:
            block_id, index = divmod(block.object_id, self._objects_per_block)
            runs = self._runs[index]
        return self._address + block_id * self._block_bytes, self._device_id, runs


def _runs_of(cut: BlockSlicing, object_id: int) -> tuple[int, NDArray[np.uint64]]:
    """Returns the block of an object, and `[runs, 2]`: offset and length of its runs there."""
    block_id, runs = object_runs(cut, object_id) or (0, ())
    return block_id, np.array(runs, np.uint64) if runs else _NO_RUNS


def ranges_to_proto(ranges: RangeTable) -> pb.KvMemoryRanges:
    """Returns the wire form of ranges."""
    addresses, num_bytes, device_ids = ranges.T.tolist()
    return pb.KvMemoryRanges(addresses=addresses, num_bytes=num_bytes, device_ids=device_ids)


def ranges_from_proto(ranges: pb.KvMemoryRanges) -> RangeTable:
    """Parses the wire form of ranges.

    Raises:
        ValueError: the columns are not equally long.
    """
    columns = ranges.addresses, ranges.num_bytes, ranges.device_ids
    if len({len(column) for column in columns}) > 1:
        raise ValueError("the columns of ranges are not equally long")
    addresses, num_bytes, device_ids = columns
    return make_ranges(addresses, num_bytes, device_ids)
