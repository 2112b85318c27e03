"""`BlockTable`: which blocks a sequence's tokens are in. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["NO_BLOCK", "BlockTable", "TableChange"]

NO_BLOCK = -1
"""Stands in a table where a block lies behind its group's window."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks. Only `KvCacheManager` changes it.

    Attributes:
        blocks: per layer group, block ids by block index; `NO_BLOCK` before
            the group's `first_live`.
        first_live: per layer group, index of the first block held.
        num_registered: leading blocks that were offered to the prefix cache.
        filled_by: the step that swaps its blocks in: until it has reported,
            they are not offered. 0 where they were not swapped.
        epoch: how often the prefix cache had been reset when it got its first
            block: after another reset nothing of it is offered any more.
    """

    blocks: list[list[int]]
    first_live: list[int]
    num_registered: int = 0
    filled_by: int = 0
    epoch: int = 0

    def held(self) -> Iterator[int]:
        """Every block reference that it owns: head before tail, whatever the group."""
        if len(self.blocks) == 1:
            yield from self.blocks[0][self.first_live[0] :]
            return
        for index in range(min(self.first_live), max(map(len, self.blocks))):
            for blocks, first in zip(self.blocks, self.first_live, strict=True):
                if first <= index < len(blocks):
                    yield blocks[index]

    def copy(self, block_of: Mapping[int, int] | None = None) -> "BlockTable":
        """The same table; with `block_of`, of the blocks that it names instead, not yet offered."""
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
        """Empties it; its references are the caller's now."""
        self.blocks = [[] for _ in self.blocks]
        self.first_live = [0] * len(self.blocks)
        self.num_registered = self.filled_by = 0


@dataclass(frozen=True, slots=True)
class TableChange:
    """From `first_index` on, the table of layer group `group` reads `block_ids`."""

    group: int
    first_index: int
    block_ids: tuple[int, ...]
