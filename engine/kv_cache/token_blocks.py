"""`TokenBlocks`: the blocks that hold the K and V of a sequence's tokens. Pure."""

from dataclasses import dataclass

from engine.kv_cache.block_table import NO_BLOCK, BlockTable, TableChange, runs_of
from engine.kv_cache.fences import FencedPool
from engine.kv_cache.prefix_cache import PrefixMatch
from engine.kv_cache.spec import KvCacheSpec

__all__ = ["TokenBlocks"]


@dataclass(frozen=True, slots=True)
class _Admission:
    """A layer group's blocks at admission: from index `first_live` on `matched`, then new ones."""

    first_live: int
    matched: tuple[int, ...]
    num_new: int


class TokenBlocks:
    """Allocates, extends and releases the blocks of block tables, over one pool.

    It leaves the layer group of states alone.

    Args:
        spec: layer groups and their windows.
        blocks: the pool.
    """

    def __init__(self, spec: KvCacheSpec, blocks: FencedPool) -> None:
        self._spec = spec
        self._blocks = blocks
        self._pool = blocks.pool
        self._num_groups = len(spec.windows)

    def count_admission(
        self, num_tokens: int, match: PrefixMatch, num_loaded: int
    ) -> tuple[int, int]:
        """Returns how many blocks `admit` allocates, and how many matched ones no sequence has.

        Args:
            num_tokens: length of the sequence.
            match: its cached prefix.
            num_loaded: number of tokens whose KV will be loaded.
        """
        plans = self._plan_admission(num_tokens, match, num_loaded)
        num_revived = sum(len(p.matched) - self._pool.num_held(p.matched) for p in plans)
        return sum(plan.num_new for plan in plans), num_revived

    def admit(
        self, num_tokens: int, match: PrefixMatch, num_loaded: int
    ) -> tuple[list[list[int]], list[int]]:
        """Allocates a sequence's blocks; the arguments are those of `count_admission`.

        Returns:
            Per layer group, the block ids by block index, and the index of the first one held.
        """
        plans = self._plan_admission(num_tokens, match, num_loaded)
        for plan in plans:
            self._pool.acquire(plan.matched)
        blocks = [
            [*[NO_BLOCK] * plan.first_live, *plan.matched, *self._pool.allocate(plan.num_new)]
            for plan in plans
        ]
        return blocks, [plan.first_live for plan in plans]

    def num_missing(self, table: BlockTable, start: int, end: int) -> int:
        """Returns the number of blocks that `extend` takes from the free list."""
        size, missing = self._spec.block_size, 0
        stop = -(-end // size)
        for blocks in table.blocks[: self._num_groups]:
            missing += max(0, stop - len(blocks))
            for block in blocks[start // size : stop]:
                missing += not self._blocks.is_writable(block)
        return missing

    def extend(self, table: BlockTable, start: int, end: int) -> list[TableChange]:
        """Makes positions `start` to `end - 1` writable, as `KvCacheManager.append` documents."""
        changes = []
        for layer_group, blocks in enumerate(table.blocks[: self._num_groups]):
            changed = self._replace_shared(blocks, start, end)
            changed += self._add_missing(blocks, end)
            if changed:  # rarely: most tokens go to the same block as the one before
                changes += [
                    TableChange(layer_group, run.start, tuple(blocks[run.start : run.stop]))
                    for run in runs_of(changed)
                ]
        return changes

    def release(self, table: BlockTable, layer_group: int, indices: range) -> None:
        """Releases the blocks at the indices, and leaves `NO_BLOCK` there."""
        blocks = table.blocks[layer_group]
        behind = blocks[indices.start : indices.stop]
        blocks[indices.start : indices.stop] = [NO_BLOCK] * len(indices)
        self._blocks.release(behind)

    def _plan_admission(
        self, num_tokens: int, match: PrefixMatch, num_loaded: int
    ) -> list[_Admission]:
        size = self._spec.block_size
        start = max(num_loaded, match.num_blocks * size)
        num_blocks = -(-num_tokens // size)
        plans = []
        for layer_group, matched in enumerate(match.blocks[: self._num_groups]):
            first = self._spec.first_live(layer_group, start)
            stop = min(num_blocks, first + self._spec.max_live(layer_group, num_tokens))
            live = matched[first - match.first_live[layer_group] :]
            plans.append(_Admission(first, live, stop - first - len(live)))
        return plans

    def _replace_shared(self, blocks: list[int], start: int, end: int) -> list[int]:
        """Replaces the blocks of a span that are not writable; returns their indices."""
        size = self._spec.block_size
        span = range(start // size, min(len(blocks), -(-end // size)))
        shared = [index for index in span if not self._blocks.is_writable(blocks[index])]
        for index in shared:
            (target,) = self._pool.allocate(1)
            if index * size < start:
                self._blocks.copy(blocks[index], target)
            self._blocks.release([blocks[index]])
            blocks[index] = target
        return shared

    def _add_missing(self, blocks: list[int], end: int) -> range:
        """Allocates the missing blocks up to position `end`; returns their indices."""
        new = range(len(blocks), -(-end // self._spec.block_size))
        if new:
            blocks += self._pool.allocate(len(new))
        return new
