"""`HostPool`: the bounded host memory that preempted sequences are swapped to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.fences import FencedPool

__all__ = ["HostPool", "SwappedTables"]


@dataclass(frozen=True, slots=True, eq=False)
class SwappedTables:
    """Block tables on the host.

    Attributes:
        tables: as they were, of host blocks.
        host_blocks: every host block among them, once.
        step: the step that copies them out.
    """

    tables: tuple[BlockTable, ...]
    host_blocks: tuple[int, ...]
    step: int


class HostPool:
    """Moves block tables between a pool and `num_blocks` host blocks.

    Host blocks need no fence: only steps touch them, which run in order, on a
    GPU in one stream, and swap in before they swap out. The host never reads
    them itself, so nobody waits for the copies.
    """

    def __init__(self, num_blocks: int, blocks: FencedPool) -> None:
        self.num_blocks = num_blocks
        self._blocks = blocks
        self._free = list(range(num_blocks))
        self._swap_outs: dict[int, int] = {}  # of the step being built, block by host block

    @property
    def num_free(self) -> int:
        """Host blocks that can be had now."""
        return len(self._free)

    def swap_out(self, tables: Sequence[BlockTable], step: int) -> SwappedTables:
        """As `KvCacheManager.swap_out`."""
        distinct = dict.fromkeys(block for table in tables for block in table.held())
        host_of = {block: self._free.pop() for block in distinct}
        # A step swaps out before it copies: a copy's target is still to be found at its source.
        self._swap_outs |= {host: self._blocks.source_of(block) for block, host in host_of.items()}
        moved = tuple(table.copy(host_of) for table in tables)
        for table in tables:
            self._blocks.fence.hold(step, list(table.held()))
            table.clear()
        return SwappedTables(moved, tuple(host_of.values()), step)

    def swap_in(self, swapped: SwappedTables, step: int) -> list[BlockTable]:
        """As `KvCacheManager.swap_in`."""
        pool, host_blocks = self._blocks.pool, swapped.host_blocks
        block_ids = pool.allocate(len(host_blocks))
        self._blocks.swap_ins.update(zip(block_ids, host_blocks, strict=True))
        block_of = dict(zip(host_blocks, block_ids, strict=True))
        tables = [table.copy(block_of) for table in swapped.tables]
        for table in tables:
            pool.acquire(table.held())
            table.filled_by = step
        pool.release(block_ids)  # each has its tables for owners now
        self.drop(swapped)
        return tables

    def take_swaps(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """As `KvCacheManager.take_swaps`."""
        swap_outs, self._swap_outs = self._swap_outs, {}
        outs = tuple((block, host_block) for host_block, block in swap_outs.items())
        return self._blocks.take_swap_ins(), outs

    def drop(self, swapped: SwappedTables) -> None:
        """Gives the host blocks back."""
        self._free += swapped.host_blocks

    def check(self) -> None:
        """Verifies that no host block is free twice.

        Raises:
            AssertionError: a bug.
        """
        if len(self._free) != len(set(self._free)):
            raise AssertionError("a host block is free twice")
