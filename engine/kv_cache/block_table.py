"""`BlockTable`: the blocks that hold a sequence's tokens. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

__all__ = ["NO_BLOCK", "BlockTable", "TableChange", "runs_of"]

NO_BLOCK = -1
"""Table entry of a block that lies behind the window of its layer group, or, in the layer group
of states, of a block whose last state is not kept."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks. Only `KvCacheManager` changes it.

    Attributes:
        blocks: per layer group, block ids by block index; `NO_BLOCK` before
            the layer group's `first_live`. In the layer group of states the last entry is
            the *current* slot, with the state after the newest token that a step has got;
            an entry before it is the state at the end of its block, or `NO_BLOCK`.
        first_live: per layer group, index of the first block held.
        num_registered: number of leading blocks already offered to the prefix cache.
        num_named: number of those whose tokens were logged (`engine.kv_cache.token_log`).
        filled_by: number of the step that swaps the blocks in; they are offered to
            the prefix cache only after it has reported. 0 if they were not swapped.
        epoch: number of resets of the prefix cache before the table got its first
            block. After a further reset none of its blocks is offered.
        num_known: number of tokens that the sequence had at admission.
        num_applied: number of tokens that steps, those in flight included, have applied to
            the current state; while the sequence decodes, only of those up to its last block.
    """

    blocks: list[list[int]]
    first_live: list[int]
    num_registered: int = 0
    num_named: int = 0
    filled_by: int = 0
    epoch: int = 0
    num_known: int = 0
    num_applied: int = 0

    def held(self) -> Iterator[int]:
        """Yields every block reference of the table: by block index, over all layer groups."""
        if len(self.blocks) == 1:
            yield from self.blocks[0][self.first_live[0] :]
            return
        for index in range(min(self.first_live), max(map(len, self.blocks))):
            for blocks, first in zip(self.blocks, self.first_live, strict=True):
                if first <= index < len(blocks) and blocks[index] != NO_BLOCK:
                    yield blocks[index]

    def copy(self, block_of: Mapping[int, int] | None = None) -> "BlockTable":
        """Returns an equal table.

        Args:
            block_of: if set, maps each block id to the one in the copy, whose blocks then
                count as not yet offered to the prefix cache.
        """
        if block_of is None:
            blocks = [blocks.copy() for blocks in self.blocks]
            return replace(self, blocks=blocks, first_live=self.first_live.copy())
        renamed = [[block_of.get(block, NO_BLOCK) for block in blocks] for blocks in self.blocks]
        return replace(
            self,
            blocks=renamed,
            first_live=self.first_live.copy(),
            num_registered=0,
            num_named=0,
            filled_by=0,
        )

    def clear(self) -> None:
        """Empties the table. Its references pass to the caller."""
        self.blocks = [[] for _ in self.blocks]
        self.first_live = [0] * len(self.blocks)
        self.num_registered = self.num_named = self.filled_by = self.num_applied = 0


@dataclass(frozen=True, slots=True)
class TableChange:
    """From `first_index` on, the table of `layer_group` now reads `block_ids`.

    In the layer group of states these are numbers of slots, which start at 0.
    """

    layer_group: int
    first_index: int
    block_ids: tuple[int, ...]


def runs_of(indices: Sequence[int]) -> list[range]:
    """Returns ascending indices as ranges, as few as possible."""
    runs: list[range] = []
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            runs.append(range(indices[start], indices[end - 1] + 1))
            start = end
    return runs
