"""Where lent blocks lie in registered memory, for transports to reach them.

    BlockRanges      the ranges that blocks consist of
    BlockLocations   these and the blocks' headers, as a reader is told
    LentRanges       finds the ranges of a process's own blocks

Tables, not objects of ranges and blocks: a reader goes through hundreds of them before the first
byte moves.
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
    """Of which ranges blocks consist.

    Attributes:
        table: of the first block in order, of the second, ...
        counts: `[blocks]` int64: how many each has; 0 for one whose bytes are not to be reached.

    Raises:
        ValueError: the counts are not of that table.
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
        """Leading blocks that consist of ranges."""
        return int(np.logical_and.accumulate(self.counts > 0).sum())

    def select(self, blocks: Sequence[int]) -> Self:
        """Those of some blocks."""
        counts = self.counts[blocks]
        # Each range's place: its block's first one, and how many of the block are before it.
        shifts = (self.counts.cumsum() - self.counts)[blocks] - (counts.cumsum() - counts)
        return type(self)(self.table[shifts.repeat(counts) + np.arange(counts.sum())], counts)

    def parts_of(self, wholes: RangeTable) -> RangeTable:
        """The parts of blocks, each of which is in one range elsewhere, that go with the ranges.

        Args:
            wholes: a range for each block.

        Raises:
            ValueError: they are not as long as the blocks.
        """
        if len(wholes) != len(self):
            raise ValueError(f"{len(self)} blocks do not go to {len(wholes)} places")
        sizes = self.table[:, 1]
        edges = np.insert(sizes.cumsum(), 0, 0)
        ends = self.counts.cumsum()
        begins = edges[ends - self.counts]
        if not np.array_equal(edges[ends] - begins, wholes[:, 1]):
            raise ValueError(f"a block has not {wholes[0, 1]} bytes")
        parts = wholes.repeat(self.counts, axis=0)
        parts[:, 0] += edges[:-1] - begins.repeat(self.counts)
        parts[:, 1] = sizes
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class BlockLocations:
    """Where blocks of a peer lie.

    Attributes:
        headers: the codec's, one behind the other.
        ranges: of their bytes.

    Raises:
        ValueError: there is not a header for each block.
    """

    headers: bytes
    ranges: BlockRanges

    def __post_init__(self) -> None:
        if len(self.headers) != HEADER_BYTES * len(self.ranges):
            raise ValueError(f"{len(self.headers)} bytes of headers of {len(self.ranges)} blocks")

    def __len__(self) -> int:
        return len(self.ranges)

    def select(self, blocks: Sequence[int]) -> Self:
        """Where some of the blocks lie."""
        headers = np.frombuffer(self.headers, np.uint8).reshape(-1, HEADER_BYTES)
        return type(self)(headers[blocks].tobytes(), self.ranges.select(blocks))

    def to_proto(self) -> pb.KvBlockLocations:
        """As it goes to a reader."""
        ranges = ranges_to_proto(self.ranges.table)
        counts = self.ranges.counts.tolist()
        return pb.KvBlockLocations(headers=self.headers, num_ranges=counts, ranges=ranges)

    @classmethod
    def from_proto(cls, locations: pb.KvBlockLocations) -> Self:
        """As a peer tells it.

        Raises:
            ValueError: it makes no sense.
        """
        counts = np.array(locations.num_ranges, np.int64)
        return cls(locations.headers, BlockRanges(ranges_from_proto(locations.ranges), counts))


class LentRanges:
    """The pool and the tails' slots, as a transport knows them.

    Args:
        pool: `[num_blocks, *cut.layout.block_shape]`, contiguous, on any device.
        cut: how it is cut into objects.
        tails: where copies of tails lie.
        transport: what the memory is registered with.
    """

    def __init__(
        self, pool: torch.Tensor, cut: BlockSlicing, tails: TailSlots, transport: PeerTransport
    ) -> None:
        self._tails = tails
        self._address = pool.data_ptr()
        self._device_id = pool.device.index or 0
        self._block_bytes = cut.layout.block_bytes
        self._objects_per_block = cut.transfer_blocks * cut.objects_per_block
        self._runs = [_runs_of(cut, index) for index in range(self._objects_per_block)]
        transport.register(self._address, pool.nbytes, device=str(pool.device))
        frames = tails.segment.frames
        transport.register(frames.data_ptr(), frames.nbytes, device="cpu")

    def of_blocks(self, blocks: Sequence[LentBlock]) -> BlockRanges:
        """The ranges that each block consists of; none for one whose bytes in the pool are of
        another type.
        """
        places = [self._of_block(block) for block in blocks]
        counts = np.array([len(runs) for _, _, runs in places], np.int64)
        starts, devices, runs = zip(*places, strict=True) if places else ((), (), ())
        offsets, sizes = np.concatenate(runs or (_NO_RUNS,)).T
        addresses = np.array(starts, np.uint64).repeat(counts) + offsets
        device_ids = np.array(devices, np.uint64).repeat(counts)
        return BlockRanges(make_ranges(addresses, sizes, device_ids), counts)

    def _of_block(self, block: LentBlock) -> tuple[int, int, NDArray[np.uint64]]:
        """A block's memory, the GPU that it is on, and the runs in it that are the block."""
        if block.tail_slot is not None:
            address, num_bytes = self._tails.place_of(block.tail_slot)
            return address, 0, np.array([[0, num_bytes]], np.uint64)
        block_id, index = divmod(block.object_id, self._objects_per_block)
        return self._address + block_id * self._block_bytes, self._device_id, self._runs[index]


def _runs_of(cut: BlockSlicing, index: int) -> NDArray[np.uint64]:
    """`[runs, 2]`: offset and length of those of one of a block's objects."""
    found = object_runs(cut, index)
    return np.array(found[1], np.uint64) if found is not None else _NO_RUNS


def ranges_to_proto(ranges: RangeTable) -> pb.KvMemoryRanges:
    """Ranges on the wire."""
    addresses, num_bytes, device_ids = ranges.T.tolist()
    return pb.KvMemoryRanges(addresses=addresses, num_bytes=num_bytes, device_ids=device_ids)


def ranges_from_proto(ranges: pb.KvMemoryRanges) -> RangeTable:
    """Ranges from the wire.

    Raises:
        ValueError: the columns are not equally long.
    """
    columns = ranges.addresses, ranges.num_bytes, ranges.device_ids
    if len({len(column) for column in columns}) > 1:
        raise ValueError("the columns of ranges are not equally long")
    addresses, num_bytes, device_ids = columns
    return make_ranges(addresses, num_bytes, device_ids)
