"""`Admission`: which groups have blocks, who must give way, and who comes back. Pure.

A group is admitted only when all its known tokens get blocks. One that lacks a
block later makes the least important running group give way, itself if need
be. Nobody is queued that would not fit alone. So the most important group
always makes progress, and then the next is the most important.
"""

import logging
from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as Sequences

from engine.block_pool import Allocation
from engine.block_table import BlockTable
from engine.branches import Branches
from engine.config import EngineConfig
from engine.decode_set import DecodeSet
from engine.kv_cache_manager import KvCacheManager
from engine.preemption import prefers_swap
from engine.runner import StepCosts
from engine.sequence import GroupState, Sequence, SequenceGroup
from engine.step_plan import StepPlan
from engine.transfers import Transfers

__all__ = ["Admission"]

_logger = logging.getLogger("baton.engine")


class Admission:
    """The queues of one scheduler.

    Args:
        config: limits and policies.
        kv: the block tables.
        transfers: what can be loaded.
        branches: rows of sequences.
        decoding: who decodes.
        costs: what preemption weighs.
        clock: monotonic seconds.

    Attributes:
        groups: every request that has not had its last output, by id.
        chunking: running groups that have, or had lately, sequences that do not decode.
        num_preemptions: since the start.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KvCacheManager,
        transfers: Transfers,
        branches: Branches,
        decoding: DecodeSet,
        costs: StepCosts,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._kv = kv
        self._transfers = transfers
        self._branches = branches
        self._decoding = decoding
        self._costs = costs
        self._clock = clock
        self.groups: dict[str, SequenceGroup] = {}
        self.chunking: dict[SequenceGroup, list[Sequence]] = {}
        self.num_preemptions = 0
        self._waiting: list[SequenceGroup] = []  # sorted by order, swapped ones included
        self._running: list[SequenceGroup] = []  # sorted by order
        self._num_loading = 0
        self._num_seats = 0  # of running and loading groups

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return sum(len(group.running) for group in self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, for blocks or for a load."""
        return len(self._waiting) + self._num_loading

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens still to compute."""
        return sum(group.num_queued_prompt for group in (*self.chunking, *self._waiting))

    # The queues.

    def enqueue(self, group: SequenceGroup) -> None:
        """A new group waits."""
        self.groups[group.request_id] = group
        insort(self._waiting, group, key=_order)

    def start_running(self, group: SequenceGroup) -> None:
        """The group, which has blocks and seats, takes part in steps."""
        group.state = GroupState.RUNNING
        if group.num_cached is None:
            group.num_cached = min(group.lead.num_computed, group.num_prompt)
        insort(self._running, group, key=_order)
        self.chunking[group] = []

    def end_load(self, group: SequenceGroup, *, failure: str) -> None:
        """The group's load has ended: it runs, or starts over without loading."""
        self._num_loading -= 1
        if not failure:
            self.start_running(group)
            return
        _logger.warning("%s: KV load failed (%s), computing", group.request_id, failure)
        group.may_load = False
        group.num_saved = 0
        self._release(group)
        group.make_root()
        group.state = GroupState.WAITING
        insort(self._waiting, group, key=_order)

    def withdraw(self, group: SequenceGroup) -> None:
        """Takes the group out of every queue and frees what it holds."""
        match group.state:
            case GroupState.WAITING | GroupState.SWAPPED:
                _remove(self._waiting, group)
            case GroupState.RUNNING:
                _remove(self._running, group)
                self.chunking.pop(group, None)
            case GroupState.LOADING:
                self._num_loading -= 1
        if group.swapped is not None:
            self._kv.drop_swapped(group.swapped)
            group.swapped = None
        self._transfers.forget(group)
        self._release(group)

    def forget(self, group: SequenceGroup) -> None:
        """The request is over."""
        self.withdraw(group)
        group.state = GroupState.FINISHED
        del self.groups[group.request_id]

    def leave_seat(self, group: SequenceGroup) -> None:
        """One of the group's sequences has ended for good."""
        if group.num_held_seats:
            group.num_held_seats -= 1
            self._num_seats -= 1

    # What runs.

    def renew_due(self, group: SequenceGroup, due: Sequences[Sequence], plan: StepPlan) -> bool:
        """Gives decoding sequences whose block is full the next one.

        Returns:
            Whether the group still runs.
        """
        for sequence in due:
            if sequence not in self._decoding:
                continue
            position = self._decoding.position(sequence, plan.step)
            if position >= sequence.limit - 1:
                self._stop_decoding(sequence, position, plan)  # its last token is under way
                continue
            sequence.count_computed()
            self._branches.register(sequence)
            if self._extend(sequence, position, position + 1, plan):
                self._decoding.renew(sequence, plan.step)
            elif group.state is GroupState.RUNNING:
                self._stop_decoding(sequence, position, plan)
                self.chunking.setdefault(group, [])
        return group.state is GroupState.RUNNING

    def run_chunks(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Gives the group's sequences that do not decode their share of the step."""
        pending = [s for s in group.running if s not in self._decoding]
        if not pending:
            self.chunking.pop(group, None)
        for sequence in pending:
            num_tokens = min(sequence.num_unscheduled, plan.budget, self._config.max_chunk)
            if num_tokens <= 0:
                continue
            start = sequence.num_scheduled
            if self._extend(sequence, start, start + num_tokens, plan):
                plan.add_chunk(sequence, num_tokens)
            elif group.state is not GroupState.RUNNING:
                return
        if group.scheduled_at is None and pending:
            group.scheduled_at = self._clock()

    def _stop_decoding(self, sequence: Sequence, position: int, plan: StepPlan) -> None:
        self._decoding.leave(sequence)
        sequence.settle()
        sequence.num_scheduled = position
        plan.budget += 1

    def _extend(self, sequence: Sequence, start: int, end: int, plan: StepPlan) -> bool:
        """Makes positions `start` to `end` writable, at others' expense if need be."""
        assert sequence.table is not None
        if not self._make_room(sequence.group, sequence.table, start, end, plan):
            return False
        plan.update_tables(sequence, self._kv.append(sequence.table, start, end))
        return True

    def _make_room(
        self, group: SequenceGroup, table: BlockTable, start: int, end: int, plan: StepPlan
    ) -> bool:
        """Preempts until the blocks can be had; False if the group must wait, or had to go."""
        while not self._kv.can_append(table, start, end):
            num_missing = self._kv.num_missing(table, start, end)
            if num_missing <= self._kv.pool.num_free + self._kv.num_fenced:
                return False  # they come free when steps report
            if len(self._running) == 1:
                return False  # they come free when transfers end
            victim = self._running[-1]
            self._preempt(victim, plan)
            if victim is group:
                return False
        return True

    def _preempt(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Takes all blocks of a running group, which goes back to the queue."""
        plan.has_preempted = True
        plan.drop(group)
        self.num_preemptions += 1
        _remove(self._running, group)
        self.chunking.pop(group, None)
        self._transfers.forget(group)
        for sequence in group.running:
            self._branches.unseat(sequence)
            sequence.num_scheduled = sequence.num_computed
        if self._can_swap(group):
            tables = _tables(group)
            group.swapped = self._kv.swap_out(tables, plan.step)
            for sequence in group.running:
                sequence.table = None
            group.state = GroupState.SWAPPED
            self._give_seats_back(group)
            plan.swapped.append(group)
        else:
            self._release(group)
            group.beam_tops.clear()
            group.make_root()
            group.state = GroupState.WAITING
        insort(self._waiting, group, key=_order)
        _logger.debug("preempted %s: %s", group.request_id, group.state.value)

    def _can_swap(self, group: SequenceGroup) -> bool:
        blocks = list(set(group.held_blocks()))
        return (
            prefers_swap(self._config.preemption_mode, group, blocks, self._costs)
            and all(map(self._can_go_on, group.running))
            and self._kv.can_swap_out(_tables(group))
        )

    def _can_go_on(self, sequence: Sequence) -> bool:
        """Whether its blocks have what its next token sees: where a step in flight has got
        further, what has left the windows since is not held any more.
        """
        assert sequence.table is not None
        return all(
            held_from <= self._kv.spec.first_live(layers, sequence.num_computed)
            for layers, held_from in enumerate(sequence.table.first_live)
        )

    # What waits.

    def admit_waiting(self, plan: StepPlan) -> None:
        """Admits waiting groups in order, passing over those that wait for something else
        than blocks and seats.
        """
        for group in self._waiting[: self._config.max_running]:
            num_seats = self._num_seats + group.num_seats
            if plan.budget <= 0 or num_seats > self._config.max_running:
                break
            is_alone = not self._running and not self._num_loading
            admit = self._return_swapped if group.swapped is not None else self._admit
            if admit(group, plan, alone=is_alone) is Allocation.LATER:
                break

    def _admit(self, group: SequenceGroup, plan: StepPlan, *, alone: bool) -> Allocation | None:
        """Admits a group; None if it is passed over."""
        num_loadable = self._transfers.num_loadable(group)
        if num_loadable is None:
            return None
        lead = group.lead
        num_tokens = len(lead.token_ids)
        match = self._kv.match_prefix(lead.keys.extend(lead.token_ids), num_tokens)
        num_cached = match.num_blocks * self._config.block_size
        num_loaded = self._transfers.num_loaded_tokens(group, num_loadable)
        if num_loaded <= num_cached:
            num_loaded = 0
            if self._exceeds_partial(num_tokens - num_cached, plan):
                return None
        allocation = self._kv.can_admit(num_tokens, match, num_loaded=num_loaded, alone=alone)
        if allocation is not Allocation.OK:
            return allocation
        _remove(self._waiting, group)
        lead.table = self._kv.admit(num_tokens, match, num_loaded=num_loaded)
        lead.num_computed = lead.num_scheduled = num_cached
        self._take_seats(group)
        self._branches.seat(lead)
        if self._transfers.start_load(group, num_loadable):
            group.state = GroupState.LOADING
            self._num_loading += 1
        else:
            self.start_running(group)
            self.run_chunks(group, plan)
        return Allocation.OK

    def _exceeds_partial(self, num_uncomputed: int, plan: StepPlan) -> bool:
        """Whether there would be more prompts computed in part than there may be."""
        is_partial = num_uncomputed > min(plan.budget, self._config.max_chunk)
        return is_partial and plan.num_partial >= self._config.max_num_partial_prefills

    def _return_swapped(self, group: SequenceGroup, plan: StepPlan, *, alone: bool) -> Allocation:
        """Brings a group's KV back from the host."""
        assert group.swapped is not None
        # Each sequence may need a block to go on; without, the group would soon give way again.
        num_extra = 0 if alone else len(group.swapped.tables) * self._kv.spec.num_groups
        allocation = self._kv.can_swap_in(group.swapped, num_extra=num_extra, alone=alone)
        if allocation is not Allocation.OK:
            return Allocation.LATER  # alone, it fits
        _remove(self._waiting, group)
        tables = self._kv.swap_in(group.swapped, plan.step)
        group.swapped = None
        self._take_seats(group)
        for sequence, table in zip(group.running, tables, strict=True):
            sequence.table = table
            self._branches.seat(sequence)
        for sequence in [s for s in group.branches if s.is_given_up]:
            group.branches.remove(sequence)
            self._branches.drop(sequence)
            self.leave_seat(group)
        plan.swapped.append(group)
        self.start_running(group)
        self.run_chunks(group, plan)
        return Allocation.OK

    # Seats and blocks.

    def _take_seats(self, group: SequenceGroup) -> None:
        group.num_held_seats = group.num_seats
        self._num_seats += group.num_held_seats

    def _give_seats_back(self, group: SequenceGroup) -> None:
        self._num_seats -= group.num_held_seats
        group.num_held_seats = 0

    def _release(self, group: SequenceGroup) -> None:
        """Takes rows, seats and blocks from the group's sequences."""
        for sequence in group.running:
            self._branches.drop(sequence)
            sequence.restart()
        self._give_seats_back(group)


def _order(group: SequenceGroup) -> tuple[float, int]:
    return group.order


def _remove(groups: list[SequenceGroup], group: SequenceGroup) -> None:
    """Takes a group out of a sorted list."""
    index = bisect_left(groups, group.order, key=_order)
    assert groups[index] is group
    del groups[index]


def _tables(group: SequenceGroup) -> list[BlockTable]:
    tables = [sequence.table for sequence in group.running if sequence.table is not None]
    assert len(tables) == len(group.running), "a running sequence has blocks"
    return tables
