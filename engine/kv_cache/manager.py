"""`KvCacheManager`: allocates, shares and releases the blocks of sequences. Pure.

It alone changes block tables. `fork` shares blocks, `append` makes the slots of
the next tokens writable, copying shared blocks first (copy-on-write), and `free`
releases the references. After PagedAttention (Kwon et al. 2023). When a step is
committed, `register` offers the blocks that it filled to the prefix cache, and
then `release_behind` releases the blocks that no window sees any longer.

Released blocks that a step in flight may still read or write are *fenced*: they
stay referenced until that step reports. The engine therefore calls
`step_started` and `step_reported` for every step, overlapped or not.
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
    """A layer group's blocks at admission: from index `first_live` on `matched`, then new ones."""

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
        pool: the blocks. Transfer jobs hold their own references to the blocks that
            they read or write.
        spec: layer groups and their windows.
        events: the log of blocks entering and leaving the prefix cache.
        num_queries: total number of tokens admitted while prefix caching is enabled.
        num_hits: number of those tokens found in the prefix cache.
    """

    def __init__(
        self,
        num_blocks: int,
        spec: KvCacheSpec,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, spec.num_layer_groups)
        self.spec = spec
        self.events = self.pool.events
        self.num_queries = 0
        self.num_hits = 0
        self._epoch = 0
        self._enable_prefix_caching = enable_prefix_caching
        # Blocks kept free at admission, so that running sequences can grow a
        # little before a request must be preempted.
        self._watermark = max(1, num_blocks // 100)
        self._blocks = FencedPool(self.pool)
        self._host = HostPool(num_host_blocks, self._blocks)
        self._prefixes = PrefixCache(self.pool, spec, self._blocks.fence)

    @property
    def num_fenced(self) -> int:
        """Blocks whose only references are fenced."""
        return self._blocks.num_fenced

    @property
    def num_host_used(self) -> int:
        """Host blocks in use."""
        return self._host.num_blocks - self._host.num_free

    @property
    def newest_step(self) -> int:
        """Number of the step started last; 0 before the first."""
        return self._blocks.fence.newest_step

    def is_pending(self, step: int) -> bool:
        """Whether `step` has started but not reported."""
        return self._blocks.fence.is_pending(step)

    # Prefix cache.

    def match_prefix(self, keys: Sequence[bytes], num_tokens: int) -> PrefixMatch:
        """Returns the longest cached prefix of a sequence. Changes nothing.

        Args:
            keys: keys of the sequence's full blocks.
            num_tokens: its length. At least one token is left to compute.
        """
        limit = min(len(keys), (num_tokens - 1) // self.spec.block_size)
        return self._prefixes.match(keys, limit if self._enable_prefix_caching else 0)

    def register(self, table: BlockTable, keys: Sequence[bytes], num_computed: int) -> None:
        """Offers full, computed blocks to the prefix cache, each once.

        Args:
            table: the sequence's table.
            keys: keys of its full blocks, at least of the computed ones.
            num_computed: number of its tokens whose KV is computed.
        """
        if self._enable_prefix_caching and table.epoch == self._epoch:
            self._prefixes.register(table, keys, num_computed // self.spec.block_size)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Removes the blocks of `keys` from the prefix cache, free or not."""
        for layer_group in range(self.spec.num_layer_groups):
            cached = (self.pool.lookup(key, layer_group) for key in keys)
            self.pool.forget([block for block in cached if block is not None])

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns how many blocks were in it."""
        self._epoch += 1
        return self.pool.forget_all()

    @property
    def caches_prefixes(self) -> bool:
        """Whether full blocks are indexed and matched."""
        return self._enable_prefix_caching

    @property
    def epoch(self) -> int:
        """Number of resets of the prefix cache."""
        return self._epoch

    @property
    def num_spare(self) -> int:
        """Free blocks beyond the headroom kept for running sequences."""
        return max(0, self.pool.num_free - self._watermark)

    def adopt(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None],
        block_ids: Sequence[int],
        epoch: int,
    ) -> None:
        """Offers full blocks of no sequence to layer group 0's prefix cache.

        Args:
            keys: keys of the blocks, in the order of a prompt.
            parents: per block, the key of the block before it; None for a prompt's first.
            block_ids: the blocks, which the caller references.
            epoch: `epoch` when the blocks were requested. If the cache was reset since,
                nothing is offered.
        """
        if self._enable_prefix_caching and epoch == self._epoch:
            self._prefixes.adopt(keys, parents, block_ids)

    # Admission.

    def can_admit(
        self, num_tokens: int, match: PrefixMatch, *, num_loaded: int = 0, alone: bool
    ) -> Allocation:
        """Whether a sequence of `num_tokens` tokens gets the blocks that `admit` takes.

        Args:
            num_tokens: length of the sequence.
            match: result of `match_prefix`; nothing was allocated since.
            num_loaded: number of tokens, those of `match` included, whose KV will be
                loaded; 0 if nothing is loaded.
            alone: whether nothing else runs, so that no headroom is needed.
        """
        if self.spec.blocks_for(num_tokens) > self.pool.num_blocks:
            return Allocation.NEVER
        plans = self._plan_admission(num_tokens, match, num_loaded)
        num_new = sum(plan.num_new for plan in plans)
        num_revived = sum(len(p.matched) - self.pool.num_held(p.matched) for p in plans)
        return self.pool.can_allocate(num_new, num_revived + (0 if alone else self._watermark))

    def admit(self, num_tokens: int, match: PrefixMatch, *, num_loaded: int = 0) -> BlockTable:
        """Allocates a sequence's blocks; the arguments are those of `can_admit`.

        A layer group without a window gets all its blocks; one with a window gets as many
        as it ever holds at once. The caller has checked `can_admit`.
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
        """Returns a second table that shares the same blocks.

        Its sequence may continue from the position of the last `release_behind` or later.
        """
        self.pool.acquire(table.held())
        return table.copy()

    def num_missing(self, table: BlockTable, start: int, end: int) -> int:
        """Returns the number of blocks that `append` takes from the free list."""
        size, missing = self.spec.block_size, 0
        stop = -(-end // size)
        for blocks in table.blocks:
            missing += max(0, stop - len(blocks))
            for block in blocks[start // size : stop]:
                missing += not self._blocks.is_writable(block)
        return missing

    def can_append(self, table: BlockTable, start: int, end: int) -> bool:
        """Whether there are enough free blocks for `append`."""
        return self.num_missing(table, start, end) <= self.pool.num_free

    def append(self, table: BlockTable, start: int, end: int) -> list[TableChange]:
        """Makes the slots of positions `start` to `end - 1` writable.

        A block of the span that is shared or cached is replaced by a new one, and its
        content copied if it also holds positions before `start`. Missing blocks are
        allocated. The caller has checked `can_append`.

        Returns:
            The table's changes; adjacent ones are merged.
        """
        changes = []
        for layer_group, blocks in enumerate(table.blocks):
            changed = self._replace_shared(blocks, start, end)
            changed += self._extend(blocks, end)
            if changed:  # rarely: most tokens go to the same block as the one before
                changes += [
                    TableChange(layer_group, run.start, tuple(blocks[run.start : run.stop]))
                    for run in runs_of(changed)
                ]
        return changes

    def release_behind(self, table: BlockTable, num_computed: int) -> None:
        """Releases blocks that the token at position `num_computed` and later ones do not see.

        Args:
            table: the sequence's table, whose full blocks were offered by `register`.
            num_computed: position of the first token whose KV no committed step has computed.
                Steps in flight do not count, because they may read further back.
        """
        for layer_group, blocks in enumerate(table.blocks):
            old, new = (
                table.first_live[layer_group],
                self.spec.first_live(layer_group, num_computed),
            )
            if new > old:
                behind = blocks[old:new]
                blocks[old:new] = [NO_BLOCK] * (new - old)
                table.first_live[layer_group] = new
                self._blocks.release(behind)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Returns (source, target) blocks that the step being built copies, since the last call.

        The caller calls this and `take_swaps` before `step_started`.
        """
        return self._blocks.take_copies()

    def free(self, table: BlockTable) -> None:
        """Releases all blocks of the table; cached ones stay cached until evicted."""
        self._blocks.release(list(table.held()))
        table.clear()

    # Fencing.

    def step_started(self, step: int) -> None:
        """Records the start of `step`: blocks released from now on are fenced until it reports."""
        self._blocks.fence.start(step)

    def step_reported(self, step: int) -> None:
        """Releases the blocks fenced for `step` and for steps before it."""
        self._blocks.report(step)

    def held_blocks(self) -> list[int]:
        """Returns one entry per fenced reference."""
        return list(self._blocks.fence)

    # Swapping.

    def can_swap_out(self, tables: Sequence[BlockTable]) -> bool:
        """Whether the host pool has room for all blocks of the tables."""
        return len({block for table in tables for block in table.held()}) <= self._host.num_free

    def swap_out(self, tables: Sequence[BlockTable], step: int) -> SwappedTables:
        """Moves tables to the host and empties them. Blocks that they share stay shared.

        Args:
            tables: the tables, for which the caller has checked `can_swap_out`.
            step: number of the step being built, which copies the blocks. The tables' blocks
                are fenced until it reports.
        """
        return self._host.swap_out(tables, step)

    def can_swap_in(self, swapped: SwappedTables, *, num_extra: int = 0, alone: bool) -> Allocation:
        """Whether `swap_in` gets its blocks while `num_extra` more stay free.

        Args:
            swapped: result of `swap_out`. The answer is LATER until the step that copies it
                out has started.
            num_extra: number of further blocks that the sequences need to continue.
            alone: whether nothing else runs, so that no headroom is needed.
        """
        num_blocks = len(swapped.host_blocks) + num_extra
        answer = self.pool.can_allocate(num_blocks, 0 if alone else self._watermark)
        if answer is Allocation.OK and swapped.step > self.newest_step:
            return Allocation.LATER
        return answer

    def swap_in(self, swapped: SwappedTables, step: int) -> list[BlockTable]:
        """Moves tables back from the host. `register` may offer their blocks again.

        Args:
            swapped: result of `swap_out`, for which the caller has checked `can_swap_in`.
                It is invalid afterwards.
            step: number of the step being built, which copies the blocks.
        """
        assert swapped.step < step, "a step cannot swap in what it swaps out"
        return self._host.swap_in(swapped, step)

    def drop_swapped(self, swapped: SwappedTables) -> None:
        """Frees the host blocks of swapped tables."""
        self._host.drop(swapped)

    def take_swaps(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Empties the list of swaps of the step being built.

        Returns:
            (host block, block) to copy in, and (block, host block) to copy out.
        """
        return self._host.take_swaps()

    def check(self) -> None:
        """Verifies the invariants; for tests and an idle engine.

        Raises:
            AssertionError: pools, fences or pending copies are corrupt, which is a bug.
        """
        self._blocks.check()
        self._host.check()

    # Per layer group.

    def _plan_admission(
        self, num_tokens: int, match: PrefixMatch, num_loaded: int
    ) -> list[_Admission]:
        size = self.spec.block_size
        start = max(num_loaded, match.num_blocks * size)
        num_blocks = -(-num_tokens // size)
        plans = []
        for layer_group, matched in enumerate(match.blocks):
            first = self.spec.first_live(layer_group, start)
            stop = min(num_blocks, first + self.spec.max_live(layer_group, num_tokens))
            live = matched[first - match.first_live[layer_group] :]
            plans.append(_Admission(first, live, stop - first - len(live)))
        return plans

    def _replace_shared(self, blocks: list[int], start: int, end: int) -> list[int]:
        """Replaces the blocks of a span that are not writable; returns their indices."""
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
        """Allocates the missing blocks up to position `end`; returns their indices."""
        new = range(len(blocks), -(-end // self.spec.block_size))
        if new:
            blocks += self.pool.allocate(len(new))
        return new
