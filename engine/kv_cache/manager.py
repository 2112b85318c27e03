"""`KvCacheManager`: allocates, shares and releases the blocks of sequences. Pure.

It alone changes block tables. `fork` shares blocks, `append` makes the slots of the next tokens
writable, copying shared blocks first (copy-on-write), and `free` releases the references. After
PagedAttention (Kwon et al. 2023). When a step is committed, `register` offers the blocks that it
filled to the prefix cache, and then `release_behind` releases the blocks that no window sees any
longer. `StateSlots` has the slots of recurrent layers' states, `TokenBlocks` the blocks.

Released blocks that a step in flight may still read or write are *fenced*: they
stay referenced until that step reports. The engine therefore calls
`step_started` and `step_reported` for every step, overlapped or not.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.kv_cache.block_pool import Allocation, BlockPool
from engine.kv_cache.block_table import BlockTable, TableChange
from engine.kv_cache.fences import FencedPool
from engine.kv_cache.host_pool import HostPool, SwappedTables
from engine.kv_cache.prefix_cache import PrefixCache, PrefixMatch
from engine.kv_cache.spec import KvCacheSpec
from engine.kv_cache.state_slots import StateSlots
from engine.kv_cache.token_blocks import TokenBlocks

__all__ = ["KvCacheManager", "PrefixMatch", "SwappedTables"]


class KvCacheManager:
    """Block tables over one pool, and a host pool that they can be swapped to.

    Args:
        num_blocks: blocks in the pool.
        spec: layer groups and their windows.
        enable_prefix_caching: whether full blocks are indexed and matched.
        num_host_blocks: blocks in the host pool.
        num_slots: slots in the pool, at least one if the model has recurrent layers.
        num_host_slots: slots in the host pool.

    Attributes:
        pool: the blocks. Transfer jobs hold their own references to the blocks that
            they read or write.
        spec: layer groups and their windows.
        states: the slots of states; None for a model without recurrent layers.
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
        num_slots: int = 0,
        num_host_slots: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, spec.num_layer_groups, num_slots)
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
        self._host = HostPool(num_host_blocks, self._blocks, num_host_slots)
        self._tokens = TokenBlocks(spec, self._blocks)
        self.states = None if spec.states is None else StateSlots(spec, self._blocks)
        self._prefixes = PrefixCache(self.pool, spec, self._blocks.fence)

    @property
    def num_fenced(self) -> int:
        """Blocks, without slots, whose only references are fenced."""
        return self._blocks.num_fenced

    @property
    def num_host_used(self) -> int:
        """Host blocks in use, without slots."""
        return self._host.num_blocks - self._host.num_free

    @property
    def newest_step(self) -> int:
        """Number of the step started last; 0 before the first."""
        return self._blocks.fence.newest_step

    def is_pending(self, step: int) -> bool:
        """Whether `step` has started but not reported."""
        return self._blocks.fence.is_pending(step)

    # Prefix cache.

    def match_prefix(
        self, keys: Sequence[bytes], num_tokens: int, *, num_loaded: int = 0
    ) -> PrefixMatch:
        """Returns the longest cached prefix of a sequence. Changes nothing.

        Args:
            keys: keys of the sequence's full blocks.
            num_tokens: its length. At least one token is left to compute.
            num_loaded: number of its tokens whose KV will be loaded, the prefix included, and
                states at their end, so that the prefix needs none; it ends before the block with
                those states, which must not be cached before they are loaded. 0 without a load.
        """
        num_usable = min(num_tokens - 1, num_loaded or num_tokens)
        if num_loaded and self.spec.states is not None:
            num_usable = min(num_usable, num_loaded - 1)
        limit = num_usable // self.spec.block_size if self._enable_prefix_caching else 0
        return self._prefixes.match(keys, min(limit, len(keys)), needs_states=not num_loaded)

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
        states = self.states
        if states is not None and not states.can_admit(match, num_loaded, alone=alone):
            return Allocation.LATER
        num_new, num_revived = self._tokens.count_admission(num_tokens, match, num_loaded)
        return self.pool.can_allocate(num_new, num_revived + (0 if alone else self._watermark))

    def admit(self, num_tokens: int, match: PrefixMatch, *, num_loaded: int = 0) -> BlockTable:
        """Allocates a sequence's blocks; the arguments are those of `can_admit`.

        A layer group without a window gets all its blocks; one with a window gets as many
        as it ever holds at once. A model with states gets its current slot, for the states
        that are loaded, or that which was matched. The caller has checked `can_admit`.
        """
        if self._enable_prefix_caching:
            self.num_queries += num_tokens
            self.num_hits += match.num_blocks * self.spec.block_size
        blocks, first_live = self._tokens.admit(num_tokens, match, num_loaded)
        table = BlockTable(
            blocks, first_live, match.num_blocks, epoch=self._epoch, num_known=num_tokens
        )
        if self.states is not None:
            self.states.admit(table, match, num_loaded)
        return table

    # Growth.

    def fork(self, table: BlockTable) -> BlockTable:
        """Returns a second table that shares the same blocks.

        Its sequence may continue from the position of the last `release_behind` or later.
        """
        self.pool.acquire(table.held())
        return table.copy()

    def num_missing(self, table: BlockTable, start: int, end: int) -> int:
        """Returns the number of blocks, without slots, that `append` takes from the free list."""
        return self._tokens.num_missing(table, start, end)

    def can_append(
        self, table: BlockTable, start: int, end: int, *, are_drafts: bool = False
    ) -> bool:
        """Whether there are enough free blocks and slots for `append`."""
        has_slots = self._num_missing_slots(table, are_drafts) <= self.pool.num_free_slots
        return has_slots and self.num_missing(table, start, end) <= self.pool.num_free

    def will_append(self, table: BlockTable, start: int, end: int, *, num_freed: int = 0) -> bool:
        """Whether there are enough once the steps in flight have reported.

        Args:
            table: a sequence's table.
            start: first position to make writable.
            end: the position after the last one.
            num_freed: blocks that are freed until then besides.
        """
        num_coming_slots = self.pool.num_free_slots + self._blocks.num_fenced_slots
        if self._num_missing_slots(table, are_drafts=False) > num_coming_slots:
            return False
        num_coming = self.pool.num_free + self.num_fenced + num_freed
        return self.num_missing(table, start, end) <= num_coming

    def append(
        self, table: BlockTable, start: int, end: int, *, are_drafts: bool = False
    ) -> list[TableChange]:
        """Makes the slots of positions `start` to `end - 1` writable.

        A block of the span that is shared or cached is replaced by a new one, and its
        content copied if it also holds positions before `start`. Missing blocks are
        allocated. The caller has checked `can_append`.

        Args:
            table: the sequence's table.
            start: first position to make writable.
            end: the position after the last one.
            are_drafts: whether the positions are those of draft tokens, which are not applied
                to states.

        Returns:
            The table's changes; adjacent ones are merged.
        """
        changes = self._tokens.extend(table, start, end)
        if self.states is not None and not are_drafts:
            changes += self.states.extend(table, start, end)
        return changes

    def whole(self, table: BlockTable) -> list[TableChange]:
        """Returns all that a runner must know of a table, as changes of an empty one."""
        changes = [
            TableChange(layer_group, first, tuple(blocks[first:]))
            for layer_group, (blocks, first) in enumerate(
                zip(table.blocks, table.first_live, strict=True)
            )
        ]
        if self.states is not None:
            slots = changes.pop()
            numbers = self.states.numbers(slots.block_ids)
            changes.append(replace(slots, block_ids=numbers))
        return changes

    # Release.

    def release_behind(self, table: BlockTable, num_computed: int) -> None:
        """Releases blocks that the token at position `num_computed` and later ones do not see.

        Args:
            table: the sequence's table, whose full blocks were offered by `register`.
            num_computed: position of the first token whose KV no committed step has computed.
                Steps in flight do not count, because they may read further back.
        """
        for layer_group, old in enumerate(table.first_live):
            new = self.spec.first_live(layer_group, num_computed)
            if new > old:
                table.first_live[layer_group] = new
                if layer_group == self.spec.state_group:
                    assert self.states is not None
                    self.states.release(table, range(old, new))
                else:
                    self._tokens.release(table, layer_group, range(old, new))

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
        """Whether the host pool has room for all blocks and slots of the tables."""
        return self._host.has_room(tables)

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
        num_slots = sum(map(self._host.is_slot, swapped.host_blocks))
        num_blocks = len(swapped.host_blocks) - num_slots + num_extra
        answer = self.pool.can_allocate(num_blocks, 0 if alone else self._watermark)
        # Sequences that share a slot copy it before they go on.
        num_slots = num_slots if alone else max(num_slots, len(swapped.tables))
        if answer is Allocation.OK and num_slots > self.pool.num_free_slots:
            return Allocation.LATER
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

    def _num_missing_slots(self, table: BlockTable, are_drafts: bool) -> int:
        return 0 if self.states is None or are_drafts else self.states.num_missing(table)
