"""`HostPool`: the bounded host memory that preempted sequences are swapped to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.fences import FencedPool

__all__ = ["HostPool", "SwappedTables"]


@dataclass(frozen=True, slots=True, eq=False)
class SwappedTables:
    """Block tables that were swapped to the host.

    Attributes:
        tables: the tables, with host blocks in place of blocks.
        host_blocks: every host block in `tables`, once.
        step: number of the step that copies the blocks out.
    """

    tables: tuple[BlockTable, ...]
    host_blocks: tuple[int, ...]
    step: int


class HostPool:
    """Moves block tables between a pool and `num_blocks` host blocks and `num_slots` host slots.

    Ids of host slots follow those of the host blocks. Host blocks need no fence. Only steps
    access them; steps run in order (on a GPU, in one stream) and swap in before they swap out.
    """

    def __init__(self, num_blocks: int, blocks: FencedPool, num_slots: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self._blocks = blocks
        self._free = list(range(num_blocks))
        self._free_slots = list(range(num_blocks, num_blocks + num_slots))
        self._swap_outs: dict[int, int] = {}  # block by host block, in the step being built

    @property
    def num_free(self) -> int:
        """Number of free host blocks."""
        return len(self._free)

    def is_slot(self, host_block: int) -> bool:
        """Whether an id is that of a host slot."""
        return host_block >= self.num_blocks

    def has_room(self, tables: Sequence[BlockTable]) -> bool:
        """Whether all blocks and slots of the tables can be swapped out."""
        distinct = {block for table in tables for block in table.held()}
        num_slots = sum(map(self._blocks.pool.is_slot, distinct))
        return num_slots <= len(self._free_slots) and len(distinct) - num_slots <= len(self._free)

    def swap_out(self, tables: Sequence[BlockTable], step: int) -> SwappedTables:
        """Implements `KvCacheManager.swap_out`, which documents the arguments."""
        distinct = dict.fromkeys(block for table in tables for block in table.held())
        is_slot = self._blocks.pool.is_slot
        host_of = {
            block: (self._free_slots if is_slot(block) else self._free).pop() for block in distinct
        }
        # A step swaps out before it copies, so the content of a copy's target is at its source.
        self._swap_outs |= {host: self._blocks.source_of(block) for block, host in host_of.items()}
        moved = tuple(table.copy(host_of) for table in tables)
        for table in tables:
            self._blocks.fence.hold(step, list(table.held()))
            table.clear()
        return SwappedTables(moved, tuple(host_of.values()), step)

    def swap_in(self, swapped: SwappedTables, step: int) -> list[BlockTable]:
        """Implements `KvCacheManager.swap_in`, which documents the arguments."""
        pool, host_blocks = self._blocks.pool, swapped.host_blocks
        num_slots = sum(map(self.is_slot, host_blocks))
        new_blocks = iter(pool.allocate(len(host_blocks) - num_slots))
        new_slots = iter(pool.allocate_slots(num_slots))
        block_ids = [next(new_slots if self.is_slot(host) else new_blocks) for host in host_blocks]
        self._blocks.swap_ins.update(zip(block_ids, host_blocks, strict=True))
        block_of = dict(zip(host_blocks, block_ids, strict=True))
        tables = [table.copy(block_of) for table in swapped.tables]
        for table in tables:
            pool.acquire(table.held())
            table.filled_by = step
        pool.release(block_ids)  # the tables own them now
        self.drop(swapped)
        return tables

    def take_swaps(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Returns what the step being built swaps in and out, since the last call."""
        swap_outs, self._swap_outs = self._swap_outs, {}
        outs = tuple([(block, host_block) for host_block, block in swap_outs.items()])
        return self._blocks.take_swap_ins(), outs

    def drop(self, swapped: SwappedTables) -> None:
        """Frees the host blocks of swapped tables."""
        for host_block in swapped.host_blocks:
            (self._free_slots if self.is_slot(host_block) else self._free).append(host_block)

    def check(self) -> None:
        """Verifies that no host block is free twice.

        Raises:
            AssertionError: one is, which is a bug.
        """
        free = self._free + self._free_slots
        if len(free) != len(set(free)):
            raise AssertionError("a host block is free twice")
