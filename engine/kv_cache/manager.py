"""`KvCacheManager`: gives sequences their blocks, shares equal ones, takes them back. Pure.

The only place that changes a block table. `fork` shares blocks, `append` makes
the next tokens' slots writable and copies a block that others share first
(copy-on-write), `free` drops the references: PagedAttention (Kwon et al. 2023).
When a step is committed, `register` offers what it filled to the prefix cache,
and then `release_behind` drops what no window sees any longer.

Released blocks that a step in flight may still read or write are *fenced*:
they stay referenced until that step reports. So `step_started` and
`step_reported` are called for every step, overlapped or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.block_pool import Allocation, BlockPool
from engine.kv_cache.block_table import NO_BLOCK, BlockTable, TableChange
from engine.kv_cache.fences import FencedPool
from engine.kv_cache.host_pool import HostPool, SwappedTables
from engine.kv_cache.prefix_cache import PrefixCache, PrefixMatch, runs_of
from engine.kv_cache.spec import KvCacheSpec

__all__ = ["KvCacheManager", "PrefixMatch", "SwappedTables"]


@dataclass(frozen=True, slots=True)
class _Admission:
    """What one layer group gets: from block `first_live` on, `matched` and then new blocks."""

    first_live: int
    matched: tuple[int, ...]
    num_new: int


class KvCacheManager:
    """Block tables over one pool, and a host pool that they can be swapped to.

    Args:
        num_blocks: blocks in the pool.
        spec: layer groups and their windows.
        enable_prefix_caching: whether full blocks are indexed and matched.
        num_host_blocks: blocks in the host pool.

    Attributes:
        pool: the blocks. Jobs that read or write blocks hold references of their own.
        events: what enters and leaves the prefix cache.
        num_queries: tokens of all admissions, where prefixes are cached.
        num_hits: of these, the tokens found in the prefix cache.
    """

    def __init__(
        self,
        num_blocks: int,
        spec: KvCacheSpec,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, spec.num_groups)
        self.spec = spec
        self.events = self.pool.events
        self.num_queries = 0
        self.num_hits = 0
        self._epoch = 0
        self._enable_prefix_caching = enable_prefix_caching
        # Blocks kept free at admission, so that running sequences can grow a
        # little before somebody must be preempted.
        self._watermark = max(1, num_blocks // 100)
        self._blocks = FencedPool(self.pool)
        self._host = HostPool(num_host_blocks, self._blocks)
        self._prefixes = PrefixCache(self.pool, spec, self._blocks.fence)

    @property
    def num_fenced(self) -> int:
        """Blocks that nobody but steps in flight holds."""
        return self._blocks.num_fenced

    @property
    def num_host_used(self) -> int:
        """Host blocks in use."""
        return self._host.num_blocks - self._host.num_free

    # Prefix cache.

    def match_prefix(self, keys: Sequence[bytes], num_tokens: int) -> PrefixMatch:
        """The longest cached prefix of a sequence. Changes nothing.

        Args:
            keys: keys of its full blocks.
            num_tokens: its tokens, of which at least one is left to compute.
        """
        limit = min(len(keys), (num_tokens - 1) // self.spec.block_size)
        return self._prefixes.match(keys, limit if self._enable_prefix_caching else 0)

    def register(self, table: BlockTable, keys: Sequence[bytes], num_computed: int) -> None:
        """Offers full, computed blocks to the prefix cache, each once.

        Args:
            table: the sequence's.
            keys: keys of its full blocks, of the computed ones at least.
            num_computed: its tokens whose KV is computed.
        """
        if self._enable_prefix_caching and table.epoch == self._epoch:
            self._prefixes.register(table, keys, num_computed // self.spec.block_size)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Takes what is cached under `keys` out of the prefix cache, held or not."""
        for group in range(self.spec.num_groups):
            cached = (self.pool.lookup(key, group) for key in keys)
            self.pool.forget([block for block in cached if block is not None])

    def reset_prefix_cache(self) -> int:
        """Forgets every cached block, held ones too; returns how many."""
        self._epoch += 1
        return self.pool.forget_all()

    @property
    def caches_prefixes(self) -> bool:
        """Whether full blocks are indexed and matched."""
        return self._enable_prefix_caching

    @property
    def epoch(self) -> int:
        """How often the prefix cache was reset."""
        return self._epoch

    @property
    def num_spare(self) -> int:
        """Free blocks beyond what running sequences may need soon."""
        return max(0, self.pool.num_free - self._watermark)

    def adopt(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None],
        block_ids: Sequence[int],
        epoch: int,
    ) -> None:
        """Offers full blocks that belong to no sequence to the prefix cache of group 0.

        Args:
            keys: their keys, in the order of a prompt.
            parents: keys of the blocks before them; None for a prompt's first.
            block_ids: the blocks, which the caller holds.
            epoch: the cache's when they were asked for: what was reset since stays forgotten.
        """
        if not self._enable_prefix_caching or epoch != self._epoch:
            return
        run: list[bytes] = []
        parent_of_run: bytes | None = None
        for key, parent, block_id in zip(keys, parents, block_ids, strict=True):
            if not self.pool.register(block_id, key):
                continue
            if not run or parent != run[-1]:
                self.events.record_stored(run, parent_of_run)
                run, parent_of_run = [], parent
            run.append(key)
        self.events.record_stored(run, parent_of_run)

    # Admission.

    def can_admit(
        self, num_tokens: int, match: PrefixMatch, *, num_loaded: int = 0, alone: bool
    ) -> Allocation:
        """Whether a sequence of `num_tokens` tokens gets the blocks that `admit` takes.

        Args:
            num_tokens: tokens that the sequence has.
            match: from `match_prefix`, since when nothing was allocated.
            num_loaded: tokens whose KV will be loaded, those of `match` included;
                0 to begin with what `match` has.
            alone: nothing else runs, so no headroom need be kept.
        """
        if self.spec.blocks_for(num_tokens) > self.pool.num_blocks:
            return Allocation.NEVER
        plans = self._plan_admission(num_tokens, match, num_loaded)
        num_new = sum(plan.num_new for plan in plans)
        num_revived = sum(len(p.matched) - self.pool.num_held(p.matched) for p in plans)
        return self.pool.can_allocate(num_new, num_revived + (0 if alone else self._watermark))

    def admit(self, num_tokens: int, match: PrefixMatch, *, num_loaded: int = 0) -> BlockTable:
        """Gives a sequence its blocks: all of a group that sees everything, and of a
        group with a window as many as it ever holds at once.

        The caller has asked `can_admit`.
        """
        if self._enable_prefix_caching:
            self.num_queries += num_tokens
            self.num_hits += match.num_blocks * self.spec.block_size
        plans = self._plan_admission(num_tokens, match, num_loaded)
        for plan in plans:
            self.pool.acquire(plan.matched)
        blocks = [
            [*[NO_BLOCK] * plan.first_live, *plan.matched, *self.pool.allocate(plan.num_new)]
            for plan in plans
        ]
        return BlockTable(
            blocks, [plan.first_live for plan in plans], match.num_blocks, epoch=self._epoch
        )

    # Growth.

    def fork(self, table: BlockTable) -> BlockTable:
        """A second owner's table of the same blocks.

        It may go on from any position, that of the last `release_behind` or later.
        """
        self.pool.acquire(table.held())
        return table.copy()

    def num_missing(self, table: BlockTable, start: int, end: int) -> int:
        """Blocks that `append` takes from the free list."""
        size, missing = self.spec.block_size, 0
        stop = -(-end // size)
        for blocks in table.blocks:
            missing += max(0, stop - len(blocks))
            for block in blocks[start // size : stop]:
                missing += not self._blocks.is_writable(block)
        return missing

    def can_append(self, table: BlockTable, start: int, end: int) -> bool:
        """Whether `append` finds free what it needs."""
        return self.num_missing(table, start, end) <= self.pool.num_free

    def append(self, table: BlockTable, start: int, end: int) -> list[TableChange]:
        """Makes the slots of positions `start` to `end - 1` writable.

        A block of the span that others own, or that is cached, is replaced, and
        copied if positions before `start` lie in it. Blocks that lack are
        allocated. The caller has asked `can_append`.

        Returns:
            What changed in the table, in runs as long as can be.
        """
        changes = []
        for group, blocks in enumerate(table.blocks):
            changed = self._replace_shared(blocks, start, end)
            changed += self._extend(blocks, end)
            if changed:  # seldom: most tokens go where the last one went
                changes += [
                    TableChange(group, run.start, tuple(blocks[run.start : run.stop]))
                    for run in runs_of(changed)
                ]
        return changes

    def release_behind(self, table: BlockTable, num_computed: int) -> None:
        """Releases what lies behind every window of the token at position `num_computed`.

        Args:
            table: the sequence's, whose full blocks were offered by `register`.
            num_computed: position of the first token whose KV is not computed yet, as far as
                steps are committed: those in flight may still read further back than later ones.
        """
        for group, blocks in enumerate(table.blocks):
            old, new = table.first_live[group], self.spec.first_live(group, num_computed)
            if new > old:
                behind = blocks[old:new]
                blocks[old:new] = [NO_BLOCK] * (new - old)
                table.first_live[group] = new
                self._blocks.release(behind)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, target) blocks to copy in the step being built, since the last call.

        Called before `step_started`, as `take_swaps` is.
        """
        return self._blocks.take_copies()

    def free(self, table: BlockTable) -> None:
        """Takes all blocks from the table; cached ones stay until evicted."""
        self._blocks.release(list(table.held()))
        table.clear()

    # Fencing.

    def step_started(self, step: int) -> None:
        """From now on released blocks are held back until `step` reports, or a later one."""
        self._blocks.fence.start(step)

    def step_reported(self, step: int) -> None:
        """Frees what was held back for `step` and those before it."""
        self._blocks.report(step)

    def held_blocks(self) -> list[int]:
        """One entry per reference that is held back."""
        return list(self._blocks.fence)

    # Swapping.

    def can_swap_out(self, tables: Sequence[BlockTable]) -> bool:
        """Whether the host pool has room for all blocks of the tables."""
        return len({block for table in tables for block in table.held()}) <= self._host.num_free

    def swap_out(self, tables: Sequence[BlockTable], step: int) -> SwappedTables:
        """Moves tables to the host, and empties them. What they share stays shared.

        Args:
            tables: for which `can_swap_out` was asked.
            step: the step being built, which copies; their blocks are fenced until it reports.
        """
        return self._host.swap_out(tables, step)

    def can_swap_in(self, swapped: SwappedTables, *, num_extra: int = 0, alone: bool) -> Allocation:
        """Whether `swap_in` gets its blocks, and `num_extra` more stay free.

        Args:
            swapped: from `swap_out`. LATER while the step that copies it out has not started.
            num_extra: blocks that the sequences need to go on.
            alone: nothing else runs, so no headroom need be kept.
        """
        num_blocks = len(swapped.host_blocks) + num_extra
        answer = self.pool.can_allocate(num_blocks, 0 if alone else self._watermark)
        if answer is Allocation.OK and swapped.step > self._blocks.fence.newest_step:
            return Allocation.LATER
        return answer

    def swap_in(self, swapped: SwappedTables, step: int) -> list[BlockTable]:
        """Moves tables back from the host, to be offered to the prefix cache anew.

        Args:
            swapped: from `swap_out`, for which `can_swap_in` was asked; of no use any longer.
            step: the step being built, which copies.
        """
        assert swapped.step < step, "what is swapped out can come back in a later step"
        return self._host.swap_in(swapped, step)

    def drop_swapped(self, swapped: SwappedTables) -> None:
        """Gives the host blocks back."""
        self._host.drop(swapped)

    def take_swaps(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """What the step being built swaps, since the last call.

        Returns:
            (host block, block) to copy in, and (block, host block) to copy out.
        """
        return self._host.take_swaps()

    def check(self) -> None:
        """Verifies the invariants, for tests and idle moments.

        Raises:
            AssertionError: pools, fences or pending copies are corrupt; a bug.
        """
        self._blocks.check()
        self._host.check()

    # One layer group.

    def _plan_admission(
        self, num_tokens: int, match: PrefixMatch, num_loaded: int
    ) -> list[_Admission]:
        size = self.spec.block_size
        start = max(num_loaded, match.num_blocks * size)
        num_blocks = -(-num_tokens // size)
        plans = []
        for group, matched in enumerate(match.blocks):
            first = self.spec.first_live(group, start)
            stop = min(num_blocks, first + self.spec.max_live(group, num_tokens))
            live = matched[first - match.first_live[group] :]
            plans.append(_Admission(first, live, stop - first - len(live)))
        return plans

    def _replace_shared(self, blocks: list[int], start: int, end: int) -> list[int]:
        """Replaces the blocks of a span that must not be written; returns their indices."""
        size = self.spec.block_size
        span = range(start // size, min(len(blocks), -(-end // size)))
        shared = [index for index in span if not self._blocks.is_writable(blocks[index])]
        for index in shared:
            (target,) = self.pool.allocate(1)
            if index * size < start:
                self._blocks.copy(blocks[index], target)
            self._blocks.release([blocks[index]])
            blocks[index] = target
        return shared

    def _extend(self, blocks: list[int], end: int) -> range:
        """Allocates what lacks up to `end`; returns the indices."""
        new = range(len(blocks), -(-end // self.spec.block_size))
        if new:
            blocks += self.pool.allocate(len(new))
        return new
