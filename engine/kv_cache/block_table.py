"""`BlockTable`: the blocks that hold a sequence's tokens. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["NO_BLOCK", "BlockTable", "TableChange"]

NO_BLOCK = -1
"""Table entry of a block that lies behind the window of its layer group."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks. Only `KvCacheManager` changes it.

    Attributes:
        blocks: per layer group, block ids by block index; `NO_BLOCK` before
            the layer group's `first_live`.
        first_live: per layer group, index of the first block held.
        num_registered: number of leading blocks already offered to the prefix cache.
        filled_by: number of the step that swaps the blocks in; they are offered to
            the prefix cache only after it has reported. 0 if they were not swapped.
        epoch: number of resets of the prefix cache before the table got its first
            block. After a further reset none of its blocks is offered.
    """

    blocks: list[list[int]]
    first_live: list[int]
    num_registered: int = 0
    filled_by: int = 0
    epoch: int = 0

    def held(self) -> Iterator[int]:
        """Yields every block reference of the table: by block index, over all layer groups."""
        if len(self.blocks) == 1:
            yield from self.blocks[0][self.first_live[0] :]
            return
        for index in range(min(self.first_live), max(map(len, self.blocks))):
            for blocks, first in zip(self.blocks, self.first_live, strict=True):
                if first <= index < len(blocks):
                    yield blocks[index]

    def copy(self, block_of: Mapping[int, int] | None = None) -> "BlockTable":
        """Returns an equal table.

        Args:
            block_of: if set, maps each block id to the one in the copy, whose blocks then
                count as not yet offered to the prefix cache.
        """
        if block_of is None:
            return BlockTable(
                [blocks.copy() for blocks in self.blocks],
                self.first_live.copy(),
                self.num_registered,
                self.filled_by,
                self.epoch,
            )
        renamed = [[block_of.get(block, NO_BLOCK) for block in blocks] for blocks in self.blocks]
        return BlockTable(renamed, self.first_live.copy(), epoch=self.epoch)

    def clear(self) -> None:
        """Empties the table. Its references pass to the caller."""
        self.blocks = [[] for _ in self.blocks]
        self.first_live = [0] * len(self.blocks)
        self.num_registered = self.filled_by = 0


@dataclass(frozen=True, slots=True)
class TableChange:
    """From `first_index` on, the table of `layer_group` now reads `block_ids`."""

    layer_group: int
    first_index: int
    block_ids: tuple[int, ...]
