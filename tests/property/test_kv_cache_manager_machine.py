"""State machine over the KV cache manager, with a simulated pool of contents.

Steps are built, started, executed and reported in separate rules, with up to two
in flight. A step reads and writes blocks as late as possible, when it reports;
other owners write to blocks that they allocate at once. A block that is released
too early therefore shows as a wrong token: every chunk checks all positions that
its windows see, through a row table built from the reported table changes alone.

The content of a slot is the tokens that were applied to the state in it. A chunk reads the
state before its first token and stores states by the rule of the kernels
(`engine.kv_cache.state_slots`). So a token that is applied twice, or never, shows at once.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.kv_cache.block_pool import Allocation
from engine.kv_cache.block_table import NO_BLOCK, BlockTable, TableChange
from engine.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared
from engine.kv_cache.host_pool import SwappedTables
from engine.kv_cache.manager import KvCacheManager
from engine.kv_cache.spec import KvCacheSpec, StateSpacing
from engine.kv_cache.token_log import TokensCleared, TokensRemoved, TokensStored

MAX_TOKENS = 12
MANY = st.integers(0, 50)
FOREIGN = "written by another owner"
WINDOWS = [(None,), (3,), (None, 3), (1, 4, None), (2, None, None)]
STATES = st.none() | st.tuples(st.integers(1, 3), st.integers(1, 2))
ACTIONS = (
    *("chunk",) * 5,
    "drafts",
    *("branch",) * 4,
    *("free",) * 2,
    *("foreign",) * 2,
    *("swap_out",) * 2,
    *("swap_in",) * 3,
    "return",
)


@dataclass(eq=False)
class Seq:
    tokens: list[int]
    table: BlockTable
    rows: list[list[int]]  # `table` as a runner knows it
    computed: int
    scheduled: int  # start of the next chunk
    is_stale: bool = False  # the prefix cache was reset since it got its blocks

    def keys(self, block_size: int) -> list[bytes]:
        ends = range(block_size, len(self.tokens) + 1, block_size)
        return [bytes(self.tokens[:end]) for end in ends]


@dataclass(eq=False)
class Write:
    """A chunk in flight, with the row tables of its step, through which it reads and writes."""

    seq: Seq
    start: int
    tokens: list[int]
    rows: list[list[int]]
    is_void: bool = False  # its sequence went back meanwhile


@dataclass(eq=False)
class Step:
    number: int
    swap_ins: tuple[tuple[int, int], ...]
    swap_outs: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int], ...]
    writes: list[Write]


class ManagerMachine(RuleBasedStateMachine):
    """Sequences that grow, fork, share, swap and end while steps are in flight."""

    @initialize(
        block_size=st.integers(1, 3),
        windows=st.sampled_from(WINDOWS),
        states=STATES,
        num_slots=st.sampled_from([1, 2, 3, 5, 8, 100]),
        num_reserved=st.integers(0, 3),
        num_host_slots=st.sampled_from([0, 1, 3, 20]),
        max_chunk=st.integers(1, 5),
        num_spare=st.sampled_from([0, 0, 1, 2, 4, 8]),
        num_host_blocks=st.sampled_from([0, 4, 20]),
        caching=st.booleans(),
        depth=st.integers(1, 2),
    )
    def start(
        self,
        block_size: int,
        windows: tuple[int | None, ...],
        states: tuple[int, int] | None,
        num_slots: int,
        num_reserved: int,
        num_host_slots: int,
        max_chunk: int,
        num_spare: int,
        num_host_blocks: int,
        caching: bool,
        depth: int,
    ) -> None:
        self.max_chunk = max_chunk
        spacing = None
        if states is not None:
            spacing = StateSpacing(states[0] * block_size, states[0] * states[1] * block_size)
        self.spec = KvCacheSpec(block_size, windows, max_chunk * depth, spacing)
        self.num_slots, self.num_host_slots = (
            (0, 0) if states is None else (num_slots, num_host_slots)
        )
        self.keeps_all = num_slots == 100 and windows == (None,)
        self.num_blocks = self.spec.blocks_for(MAX_TOKENS) + num_spare
        self.num_host_blocks = num_host_blocks
        self.kv = KvCacheManager(
            self.num_blocks,
            self.spec,
            enable_prefix_caching=caching,
            num_host_blocks=num_host_blocks,
            num_slots=self.num_slots,
            num_host_slots=self.num_host_slots,
        )
        if self.kv.states is not None:
            self.kv.states.num_reserved = num_reserved
        self.depth = depth
        # A block has a value per token, a slot one: the tokens applied to the state.
        self.content: list[list] = [[None] * block_size for _ in range(self.num_blocks)]
        self.content += [[None] for _ in range(self.num_slots)]
        self.host: list[list] = [[None] * block_size for _ in range(num_host_blocks)]
        self.host += [[None] for _ in range(self.num_host_slots)]
        self.seqs: list[Seq] = []
        self.swapped: list[tuple[list[Seq], SwappedTables]] = []
        self.foreign: list[int] = []
        self.saves: list[tuple[list[int], list]] = []
        self.flying: list[Step] = []
        self.number = 0
        self.cached: set[tuple[int, bytes]] = set()
        self.next_event = 1
        self.kv.pool.log_tokens(block_size)
        self.kv.pool.token_log._max_pending = 4
        self.named: dict[tuple[int, bytes], tuple[int, ...]] = {}
        events, snapshot = self.kv.events.start_recording()
        assert not events
        assert snapshot == (CacheCleared(0),)

    # Between steps.

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8), num_loaded=st.integers(0, 8))
    def add(self, tokens: list[int], num_loaded: int) -> None:
        seq = Seq(tokens, BlockTable([], []), [], 0, 0)
        keys = seq.keys(self.spec.block_size)
        match = self.kv.match_prefix(keys, len(tokens))
        self._check_match(match, keys, len(tokens))
        start = match.num_blocks * self.spec.block_size
        num_loaded = num_loaded if start < num_loaded <= len(tokens) else 0
        if self.kv.states and num_loaded:  # the states come with the load
            needed = keys[: num_loaded // self.spec.block_size]
            match = self.kv.match_prefix(keys, len(tokens), num_loaded=num_loaded)
            self._check_match(match, needed, len(tokens), needs_states=False)
            start = match.num_blocks * self.spec.block_size
        alone = not self.seqs
        answer = self.kv.can_admit(len(tokens), match, num_loaded=num_loaded, alone=alone)
        assert answer is not Allocation.NEVER
        if answer is Allocation.LATER:
            assert not alone or self.foreign or self.saves or self.kv.num_fenced
            return
        seq.table = self.kv.admit(len(tokens), match, num_loaded=num_loaded)
        seq.rows = self._whole(seq)
        seq.computed = seq.scheduled = max(start, num_loaded)
        # A load writes at once, even while steps are in flight.
        self._write(seq.rows, tokens, start, num_loaded)
        if self.kv.states and num_loaded:
            slot = self.kv.states.slot_after(seq.table, num_loaded)
            self.content[slot] = [tuple(tokens[:num_loaded])]
        self.seqs.append(seq)

    @rule(index=MANY)
    def fork(self, index: int) -> None:
        if not self.seqs or len(self.seqs) > 5:
            return
        parent = self.seqs[index % len(self.seqs)]
        start = parent.computed
        table = self.kv.fork(parent.table)
        child = Seq(parent.tokens[:start], table, [], start, start, parent.is_stale)
        if parent.scheduled > start and not self._go_back([child]):
            self.kv.free(table)
            return
        child.rows = self._whole(child)
        self.seqs.append(child)

    @rule(index=MANY)
    def rewind(self, index: int) -> None:
        if self.seqs and self.kv.states:
            seq = self.seqs[index % len(self.seqs)]
            if self._go_back([seq]):
                seq.rows = self._whole(seq)

    def _go_back(self, seqs: list[Seq]) -> bool:
        """Takes sequences back to states that they have; returns whether all have one."""
        if self.kv.states is None:
            return True
        ends = [self.kv.states.kept_end(seq.table, seq.computed) for seq in seqs]
        if not all(ends):
            return False
        for seq, end in zip(seqs, ends, strict=True):
            self._register(seq)
            self.kv.states.rewind(seq.table, end)
            assert end <= seq.computed
            seq.computed = seq.scheduled = end
            for write in (write for step in self.flying for write in step.writes):
                write.is_void |= write.seq is seq
        return True

    def _whole(self, seq: Seq) -> list[list[int]]:
        """Returns the table as a runner gets it for a new row."""
        rows: list[list[int]] = [[] for _ in seq.table.blocks]
        _apply(rows, self.kv.whole(seq.table))
        return rows

    @rule(index=MANY)
    def free(self, index: int) -> None:
        if self.seqs:
            seq = self.seqs.pop(index % len(self.seqs))
            self._register(seq)
            self.kv.free(seq.table)
            assert not list(seq.table.held())

    @rule(index=MANY)
    def discard(self, index: int) -> None:
        if self.seqs:
            seq = self.seqs.pop(index % len(self.seqs))
            keys = seq.keys(self.spec.block_size)
            others = [key for key in self.kv.pool.cached_keys() if key not in keys]
            self.kv.discard(keys)
            self.kv.free(seq.table)
            assert not set(keys) & {key for by in self.kv.pool._block_of for key in by}
            assert list(self.kv.pool.cached_keys()) == others

    @rule()
    def reset(self) -> None:
        num_cached = sum(not self.kv.pool.is_slot(block) for block in self._cached_blocks())
        assert self.kv.reset_prefix_cache() == num_cached
        assert not self._cached_blocks()
        for seq in (*self.seqs, *(seq for members, _ in self.swapped for seq in members)):
            seq.is_stale = True

    @rule(count=st.integers(1, 4))
    def allocate_foreign(self, count: int) -> None:
        """Another owner, such as a load, allocates blocks and writes to them at once."""
        if self.kv.pool.can_allocate(count) is Allocation.OK:
            taken = self.kv.pool.allocate(count)
            self.foreign += taken
            for block in taken:
                self.content[block] = [FOREIGN] * self.spec.block_size
        if self.kv.pool.num_free_slots:
            (slot,) = self.kv.pool.allocate_slots(1)
            self.foreign.append(slot)
            self.content[slot] = [FOREIGN]

    @rule()
    def release_foreign(self) -> None:
        assert all(slot == FOREIGN for block in self.foreign for slot in self.content[block])
        self.kv.pool.release(self.foreign)
        self.foreign = []

    @rule(index=MANY)
    def start_save(self, index: int) -> None:
        """Another owner, such as a save, reads full computed blocks for any length of time."""
        if self.seqs and not self.flying:
            seq = self.seqs[index % len(self.seqs)]
            end = seq.computed // self.spec.block_size
            blocks = [b for group in seq.table.blocks for b in group[:end] if b != NO_BLOCK]
            self.kv.pool.acquire(blocks)
            self.saves.append((blocks, [list(self.content[block]) for block in blocks]))

    @rule()
    def end_save(self) -> None:
        if self.saves:
            blocks, content = self.saves.pop(0)
            assert content == [self.content[block] for block in blocks]
            self.kv.pool.release(blocks)

    @rule()
    def drop_swapped(self) -> None:
        if self.swapped:
            self.kv.drop_swapped(self.swapped.pop()[1])

    # Steps.

    @rule(actions=st.lists(st.tuples(st.sampled_from(ACTIONS), MANY, MANY), max_size=10))
    def build_step(self, actions: list[tuple[str, int, int]]) -> None:
        if len(self.flying) == self.depth:
            self.report_step()
        self.writes: list[Write] = []
        for action, index, amount in actions:
            getattr(self, f"_do_{action}")(index, amount)
        swap_ins, swap_outs = self.kv.take_swaps()
        writes = [write for write in self.writes if write.seq in self.seqs]
        step = Step(self.number + 1, swap_ins, swap_outs, self.kv.take_copies(), writes)
        assert self.kv.take_swaps() == ((), ())
        assert self.kv.take_copies() == ()
        if step.swap_ins or step.swap_outs or step.copies or step.writes:
            self.number += 1
            self.kv.step_started(self.number)
            self.flying.append(step)
        else:
            assert not list(self.kv.held_blocks()) or self.flying

    @rule()
    def report_step(self) -> None:
        if not self.flying:
            return
        step = self.flying.pop(0)
        self._execute(step)
        for write in step.writes:
            if write.is_void:
                continue
            write.seq.computed += len(write.tokens)
            if write.seq in self.seqs:
                self._commit(write.seq)
        self.kv.step_reported(step.number)

    def _do_chunk(self, index: int, amount: int) -> None:
        if not self.seqs:
            return
        seq = self.seqs[index % len(self.seqs)]
        start, end = seq.scheduled, seq.scheduled + amount % self.max_chunk + 1
        if end > MAX_TOKENS or any(write.seq is seq for write in self.writes):
            return
        if not self.kv.can_append(seq.table, start, end):
            assert not self._could_append(seq, start, end)
            self.free(index)
            return
        seq.tokens += [(amount + i) % 2 for i in range(end - len(seq.tokens))]
        changes = self._append(seq, start, end)
        _apply(seq.rows, changes)
        self._check_span(seq, start, end)
        rows = [list(row) for row in seq.rows]
        self.writes.append(Write(seq, start, seq.tokens[:end], rows))
        seq.scheduled = end

    def _do_drafts(self, index: int, amount: int) -> None:
        """Makes room for draft tokens, behind what steps compute."""
        if self.seqs:
            seq = self.seqs[index % len(self.seqs)]
            start, end = seq.scheduled, min(seq.scheduled + amount % self.max_chunk, MAX_TOKENS)
            is_planned = any(write.seq is seq for write in self.writes)
            if (
                not is_planned
                and start < end
                and self.kv.can_append(seq.table, start, end, are_drafts=True)
            ):
                num_free = self.kv.pool.num_free_slots
                _apply(seq.rows, self.kv.append(seq.table, start, end, are_drafts=True))
                assert self.kv.pool.num_free_slots == num_free

    def _do_branch(self, index: int, amount: int) -> None:
        """Forks a sequence; both continue, in either order."""
        self.fork(index)
        for turn in range(2):
            self._do_chunk(index if (turn + amount) % 2 else len(self.seqs) - 1, amount)

    def _do_free(self, index: int, _amount: int) -> None:
        self.free(index)

    def _do_foreign(self, index: int, amount: int) -> None:
        (self.release_foreign if index % 2 else self.allocate_foreign)(
            *[amount % 3 + 1][index % 2 :]
        )

    def _do_swap_out(self, index: int, amount: int) -> None:
        group = [seq for i, seq in enumerate(self.seqs) if (i + index) % 3 <= amount % 3]
        tables = [seq.table for seq in group]
        distinct = {block for table in tables for block in table.held()}
        used = Counter(map(self._is_host_slot, self._host_used()))
        slots = {block for block in distinct if self.kv.pool.is_slot(block)}
        can_swap = len(distinct - slots) <= self.num_host_blocks - used[False]
        can_swap &= len(slots) <= self.num_host_slots - used[True]
        assert self.kv.can_swap_out(tables) == can_swap
        if not group or not can_swap:
            return
        for write in [write for write in self.writes if write.seq in group]:
            # Preempted after its chunk was chosen: the chunk is dropped.
            self.writes.remove(write)
            write.seq.scheduled = write.start
        if not self._go_back(group):
            for seq in group:
                self.free(self.seqs.index(seq))
            return
        self.swapped.append((group, self.kv.swap_out(tables, self.number + 1)))
        assert not any(list(table.held()) for table in tables)
        self.seqs = [seq for seq in self.seqs if seq not in group]

    def _do_swap_in(self, _index: int, amount: int) -> None:
        if not self.swapped:
            return
        group, swapped = self.swapped[0]
        answer = self.kv.can_swap_in(swapped, num_extra=amount % 3, alone=amount % 2 == 0)
        if answer is not Allocation.OK:
            return
        del self.swapped[0]
        tables = self.kv.swap_in(swapped, self.number + 1)
        for seq, table in zip(group, tables, strict=True):
            seq.table = table
            self._commit(seq)
            seq.rows = self._whole(seq)
        self.seqs += group

    def _do_return(self, index: int, amount: int) -> None:
        """Swapped-in sequences branch, and some of them end before the step starts."""
        self._do_swap_in(index, amount)
        self._do_branch(-1, amount)
        for turn in range(amount % 3):
            self.free(-1 - turn)

    def _append(self, seq: Seq, start: int, end: int) -> list[TableChange]:
        """Appends; checks the number of blocks taken, and that no change is redundant."""
        missing = self.kv.num_missing(seq.table, start, end)
        changes = self._append_checked(seq, start, end, missing)
        if self.kv.states:
            assert NO_BLOCK not in (seq.table.blocks[-1] or [NO_BLOCK])[-1:]
        return changes

    def _append_checked(self, seq: Seq, start: int, end: int, missing: int) -> list[TableChange]:
        before = [list(blocks) for blocks in seq.table.blocks]
        changes = self.kv.append(seq.table, start, end)
        taken = 0
        for change in changes:
            if change.layer_group == self.spec.state_group:
                continue
            old = before[change.layer_group][change.first_index :]
            assert all(a != b for a, b in zip(old, change.block_ids, strict=False))
            taken += len(change.block_ids)
        assert taken == missing
        places = [(c.layer_group, c.first_index + len(c.block_ids)) for c in changes]
        assert not set(places) & {(c.layer_group, c.first_index) for c in changes}, (
            "adjacent runs are not merged"
        )
        return changes

    def _could_append(self, seq: Seq, start: int, end: int) -> bool:
        """Whether enough blocks and slots are free."""
        if self.kv.states and not self.kv.pool.num_free_slots:
            slot = seq.table.blocks[-1][-1]
            fenced = Counter(self.kv.held_blocks())
            if self.kv.pool.num_references(slot) - fenced[slot] > 1:
                return False
        return self.kv.num_missing(seq.table, start, end) <= self.kv.pool.num_free

    def _commit(self, seq: Seq) -> None:
        """Offers computed blocks, then releases those that no window sees."""
        self._register(seq)
        before = list(seq.table.first_live)
        self.kv.release_behind(seq.table, seq.computed)
        for layer_group, blocks in enumerate(seq.table.blocks):
            first = max(before[layer_group], self.spec.first_live(layer_group, seq.computed))
            assert seq.table.first_live[layer_group] == first
            assert set(blocks[:first]) <= {NO_BLOCK}
        if self.kv.states and self.keeps_all:
            interval = self.spec.states.interval
            end = self.kv.states.kept_end(seq.table, seq.computed)
            assert end >= seq.computed // interval * interval, "a state was not kept"

    def _register(self, seq: Seq) -> None:
        keys = seq.keys(self.spec.block_size)
        self.kv.register(seq.table, keys, seq.computed)
        self.kv.pool.token_log.record(seq.table, keys, seq.tokens, "salt")

    # The simulated runner.

    def _execute(self, step: Step) -> None:
        for host_block, block in step.swap_ins:
            self.content[block] = list(self.host[host_block])
        for block, host_block in step.swap_outs:
            self.host[host_block] = list(self.content[block])
        sources = [list(self.content[source]) for source, _ in step.copies]
        for (_, target), content in zip(step.copies, sources, strict=True):
            self.content[target] = content
        for write in step.writes:
            self._check_reads(write)
        if self.kv.states:
            self._apply_states(step.writes)
        for write in step.writes:
            self._write(write.rows, write.tokens, write.start, len(write.tokens))
            write.tokens = write.tokens[write.start :]

    def _write(self, rows: list[list[int]], tokens: list[int], start: int, end: int) -> None:
        size = self.spec.block_size
        for layer_group, row in enumerate(rows[: len(self.spec.windows)]):
            for position in range(start, end):
                if row[position // size] != NO_BLOCK:
                    value = (layer_group, tuple(tokens[: position + 1]))
                    self.content[row[position // size]][position % size] = value

    def _check_reads(self, write: Write) -> None:
        size = self.spec.block_size
        for layer_group, window in enumerate(self.spec.windows):
            first = 0 if window is None else max(0, write.start - window + 1)
            for position in range(first, write.start):
                found = self.content[write.rows[layer_group][position // size]][position % size]
                assert found == (layer_group, tuple(write.tokens[: position + 1]))

    def _apply_states(self, writes: list[Write]) -> None:
        """Reads and stores states as kernels do. They do it for all sequences at once."""
        sources = {write: self._source(write) for write in writes if write.start}
        targets = {write: self._targets(write) for write in writes}
        for write, ends in targets.items():
            foreign = {slot for other, slot in sources.items() if other is not write}
            foreign |= {slot for other in writes if other is not write for slot in targets[other]}
            assert foreign.isdisjoint(ends), "a slot of another sequence is written"
        for write, source in sources.items():
            assert self.content[source] == [tuple(write.tokens[: write.start])]
        for write, ends in targets.items():
            for slot, end in ends.items():
                self.content[slot] = [tuple(write.tokens[:end])]

    def _source(self, write: Write) -> int:
        number = write.rows[-1][(write.start - 1) // self.spec.block_size]
        assert number != NO_BLOCK, "a state is read where none is kept"
        return self.num_blocks + number

    def _targets(self, write: Write) -> dict[int, int]:
        """Returns the slots that a chunk stores states to, each with the position stored last."""
        size, end, row = self.spec.block_size, len(write.tokens), write.rows[-1]
        ends = [position for position in range(write.start + 1, end) if position % size == 0]
        slots = {position: row[(position - 1) // size] for position in (*ends, end)}
        assert slots[end] != NO_BLOCK
        return {self.num_blocks + n: position for position, n in slots.items() if n != NO_BLOCK}

    # Invariants.

    def _check_span(self, seq: Seq, start: int, end: int) -> None:
        """Checks that rows and table agree on live blocks, and blocks to write are unshared."""
        size, owners = self.spec.block_size, self._owners()
        if self.kv.states:
            write = Write(seq, start, seq.tokens[:end], seq.rows)
            for slot in self._targets(write):
                assert owners[slot] == 1
                assert slot not in self._cached_blocks()
            assert seq.table.blocks[-1][-1] in self._targets(write)
        for layer_group, row in enumerate(seq.rows[: len(self.spec.windows)]):
            first = self.spec.first_live(layer_group, start)
            blocks = seq.table.blocks[layer_group]
            assert row[first : -(-end // size)] == blocks[first : -(-end // size)]
            assert NO_BLOCK not in blocks[seq.table.first_live[layer_group] :]
            num_held = len(blocks) - seq.table.first_live[layer_group]
            assert num_held <= self.spec.max_live(layer_group, MAX_TOKENS)
            for index in range(start // size, -(-end // size)):
                assert owners[row[index]] == 1
                assert row[index] not in self._cached_blocks()

    def _check_match(
        self, match, keys: list[bytes], num_tokens: int, *, needs_states: bool = True
    ) -> None:
        """Checks that the match is the longest valid prefix, with the right content."""
        size, lookup = self.spec.block_size, self.kv.pool.lookup

        def first_of(length: int, layer_group: int) -> int:
            if layer_group == self.spec.state_group:
                return max(0, length - 1)
            return self.spec.first_live(layer_group, length * size)

        def blocks_of(length: int, layer_group: int) -> list[int | None]:
            first = first_of(length, layer_group)
            return [lookup(key, layer_group) for key in keys[first:length]]

        num_groups = self.spec.num_layer_groups if needs_states else len(self.spec.windows)
        layer_groups = range(num_groups)
        lengths = range(min(len(keys), (num_tokens - 1) // size), -1, -1)
        best = next(n for n in lengths if not any(None in blocks_of(n, g) for g in layer_groups))
        assert match.num_blocks == best
        for layer_group in layer_groups:
            assert list(match.blocks[layer_group]) == blocks_of(best, layer_group)
            assert match.first_live[layer_group] == first_of(best, layer_group)
            for index, block in enumerate(match.blocks[layer_group], match.first_live[layer_group]):
                tokens = tuple(keys[index])
                if layer_group == self.spec.state_group:
                    assert self.content[block] == [tokens]
                    continue
                values = [(layer_group, tokens[: index * size + slot + 1]) for slot in range(size)]
                assert self.content[block] == values

    def _cached_blocks(self) -> list[int]:
        return [block for block_of in self.kv.pool._block_of for block in block_of.values()]

    def _owners(self) -> Counter:
        owners = Counter(block for seq in self.seqs for block in seq.table.held())
        owners.update(self.foreign)
        owners.update(block for blocks, _ in self.saves for block in blocks)
        return owners

    def _follow(self, events) -> None:
        for event in events:
            assert event.sequence_number == self.next_event
            self.next_event += 1
            match event:
                case BlocksStored(_, keys, parent, layer_group):
                    assert parent is None or keys[0].startswith(parent)
                    stored = {(layer_group, key) for key in keys}
                    assert not self.cached & stored
                    self.cached |= stored
                case BlocksRemoved(_, keys, layer_group):
                    removed = {(layer_group, key) for key in keys}
                    assert self.cached >= removed
                    self.cached -= removed
                case CacheCleared():
                    self.cached.clear()

    def _follow_tokens(self, events) -> None:
        size = self.spec.block_size
        for event in events:
            match event:
                case TokensStored(layer_group, keys, parent, token_ids, salt):
                    assert salt == "salt"
                    assert keys[0][:-size] == (parent or b"")
                    for index, key in enumerate(keys):
                        assert (layer_group, key) not in self.named
                        tokens = token_ids[index * size : (index + 1) * size]
                        self.named[layer_group, key] = tokens
                case TokensRemoved(layer_group, keys):
                    for key in keys:
                        del self.named[layer_group, key]
                case TokensCleared():
                    self.named.clear()

    @invariant()
    def references_are_owners(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        owners = self._owners()
        fenced = Counter(self.kv.held_blocks())
        assert owners + fenced == self.kv.pool.references()
        only_fenced = fenced.keys() - owners.keys()
        assert self.kv.num_fenced == sum(not self.kv.pool.is_slot(b) for b in only_fenced)
        num_swapped = sum(not self._is_host_slot(host) for host in self._host_used())
        assert num_swapped == self.kv.num_host_used <= self.num_host_blocks

    def _host_used(self) -> list[int]:
        return [host for _, swapped in self.swapped for host in swapped.host_blocks]

    def _is_host_slot(self, host: int) -> bool:
        return host >= self.num_host_blocks

    @invariant()
    def cached_states_are_those_of_their_keys(self) -> None:
        if hasattr(self, "kv") and self.kv.states:
            for key, slot in self.kv.pool._block_of[-1].items():
                assert self.content[slot] == [tuple(key)]

    @invariant()
    def nothing_older_than_a_reset_is_cached(self) -> None:
        if hasattr(self, "kv"):
            stale = {block for seq in self.seqs if seq.is_stale for block in seq.table.held()}
            assert not stale & set(self._cached_blocks())

    @invariant()
    def a_follower_knows_what_is_cached(self) -> None:
        if hasattr(self, "kv"):
            self._follow(self.kv.events.take_events())
            runs = list(self.kv.pool.cached_runs())
            assert self.cached == {(group, key) for group, keys, _ in runs for key in keys}
            for _, keys, parent in runs:
                assert keys[0].startswith(parent or b"")
            if self.number % 3:  # else events are pending for longer, and too many
                assert self.kv.pool.token_log.has_events or self.named.keys() == self.cached
                self._follow_tokens(self.kv.pool.token_log.take_events())
                size = self.spec.block_size
                assert self.named == {
                    (group, key): tuple(key[-size:]) for group, key in self.cached
                }

    def teardown(self) -> None:
        """Ends everything; then all blocks are free."""
        if not hasattr(self, "kv"):
            return
        while self.flying:
            self.report_step()
        while self.saves:
            self.end_save()
        self.release_foreign()
        while self.seqs:
            self.free(0)
        while self.swapped:
            self.drop_swapped()
        assert self.kv.pool.num_free == self.num_blocks
        assert self.kv.pool.num_free_slots == self.num_slots
        assert self.kv.num_host_used == 0


def _apply(rows: list[list[int]], changes: list[TableChange]) -> None:
    for change in changes:
        row, end = rows[change.layer_group], change.first_index + len(change.block_ids)
        row += [NO_BLOCK] * (end - len(row))
        row[change.first_index : end] = change.block_ids


def walk(seed: int, num_operations: int) -> None:
    """Runs random operations, of which most make sequences grow: Hypothesis prefers short runs."""
    draw = random.Random(seed)
    machine = ManagerMachine()
    machine.start(
        block_size=draw.randint(1, 3),
        windows=draw.choice([(None,), *WINDOWS]),
        states=draw.choice([None, *[(draw.randint(1, 3), draw.randint(1, 2))] * 3]),
        num_slots=draw.choice([1, 2, 3, 5, 8, 100]),
        num_reserved=draw.randint(0, 3),
        num_host_slots=draw.choice([0, 1, 3, 20]),
        max_chunk=draw.randint(1, 5),
        num_spare=draw.choice([0, 2, 8, 20, 40]),
        num_host_blocks=draw.choice([0, 4, 20, 50]),
        caching=draw.random() < 0.9,
        depth=draw.randint(1, 2),
    )

    def some() -> int:
        return draw.randint(0, 50)

    def actions() -> list[tuple[str, int, int]]:
        more = (*ACTIONS, *("chunk",) * 12)
        return [(draw.choice(more), some(), some()) for _ in range(draw.randint(1, 6))]

    operations: list[tuple[int, Callable[[], object]]] = [
        (30, lambda: machine.add(draw.choices((0, 1), (3, 1), k=draw.randint(1, 8)), 0)),
        (60, lambda: machine.build_step(actions())),
        (40, machine.report_step),
        (3, lambda: machine.fork(some())),
        (3, lambda: machine.free(some())),
        (3, lambda: machine.rewind(some())),
        (1, lambda: machine.discard(some())),
        (1, machine.reset),
        (1, lambda: machine.allocate_foreign(draw.randint(1, 4))),
        (3, machine.release_foreign),
        (4, lambda: machine.start_save(some())),
        (6, machine.end_save),
        (1, machine.drop_swapped),
    ]
    weights = [weight for weight, _ in operations]
    for _, operation in draw.choices(operations, weights, k=num_operations):
        operation()
        machine.references_are_owners()
        machine.cached_states_are_those_of_their_keys()
        machine.nothing_older_than_a_reset_is_cached()
        machine.a_follower_knows_what_is_cached()
    machine.teardown()


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_random_walks(first: int) -> None:
    for seed in range(first, first + 25):
        walk(seed, 100)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_operations() -> None:
    for seed in range(1000, 1500):
        walk(seed, 200)


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
