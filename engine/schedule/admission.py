"""`Admission`: shares a step's tokens and the pool's blocks among requests. Pure.

A group is admitted when there are blocks for all its known tokens. If a running group lacks a
block later, the least important running group is preempted, which may be that group itself: its
KV is copied to the host, or dropped and computed again. Requests that would not fit the pool alone
are refused before they are queued. So the most important group always makes progress until it
ends, and then the next one is the most important.
"""

from collections import abc
from collections.abc import Callable

from engine.config import EngineConfig
from engine.groups.group import GroupState, Sequence, SequenceGroup
from engine.kv_cache.block_pool import Allocation
from engine.kv_cache.manager import KvCacheManager
from engine.kv_transfer.transfers import Transfers
from engine.schedule.branches import Branches
from engine.schedule.decode_set import DecodeSet
from engine.schedule.preemption import Preemption
from engine.schedule.queues import GroupQueues
from engine.schedule.step_plan import StepPlan
from engine.speculation.drafts import Drafts, may_draft

__all__ = ["Admission"]


class Admission:
    """Decides which groups run in a step, which are preempted, and which are admitted.

    Args:
        config: limits and policies.
        kv: the block tables.
        queues: waiting and running groups.
        transfers: what can be loaded.
        branches: rows of sequences.
        decoding: the sequences that decode.
        preemption: frees blocks for running groups.
        drafts: draft tokens; None without speculation.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KvCacheManager,
        queues: GroupQueues,
        transfers: Transfers,
        branches: Branches,
        decoding: DecodeSet,
        preemption: Preemption,
        drafts: Drafts | None,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._kv = kv
        self._queues = queues
        self._transfers = transfers
        self._branches = branches
        self._decoding = decoding
        self._preemption = preemption
        self._drafts = drafts
        self._clock = clock

    # Running groups.

    def renew_due(self, group: SequenceGroup, due: abc.Sequence[Sequence], plan: StepPlan) -> bool:
        """Allocates the next block for sequences that decode and have filled their last one.

        Returns:
            Whether the group still runs.
        """
        for sequence in due:
            if sequence not in self._decoding:
                continue
            position = self._decoding.position(sequence, plan.step)
            if position >= sequence.limit - 1:
                # A step in flight draws its last token.
                self._stop_decoding(sequence, position, plan)
                continue
            self._note_decoded(sequence, position)
            sequence.count_computed()
            self._branches.register(sequence)
            self._transfers.saves.save_filled(sequence)
            self._branches.release_behind(sequence)
            if self._drafts is not None and self._drafts.should_begin(sequence):
                self._stop_decoding(sequence, position, plan)
                self._queues.chunking[group] = None
                plan.num_reserved += 1
            elif self._extend(sequence, position, position + 1, plan):
                self._decoding.renew(sequence, plan.step)
            elif group.state is GroupState.RUNNING:
                self._stop_decoding(sequence, position, plan)
                self._queues.chunking[group] = None
        return group.state is GroupState.RUNNING

    def run_chunks(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Adds chunks to the step for the group's sequences that do not decode."""
        pending = [s for s in group.running if s not in self._decoding]
        if not pending:
            self._queues.chunking.pop(group, None)
        for sequence in pending:
            plan.num_reserved = max(0, plan.num_reserved - 1)
            num_unscheduled = sequence.num_unscheduled
            room = min(plan.budget - plan.num_reserved, self._room_for(num_unscheduled, plan))
            num_tokens = min(num_unscheduled, room)
            if num_tokens <= 0 or self._exceeds_partial(num_unscheduled, plan):
                continue
            start = sequence.num_scheduled
            if self._extend(sequence, start, start + num_tokens, plan):
                self._add_chunk(sequence, num_tokens, plan)
            elif group.state is not GroupState.RUNNING:
                return
        if group.times.scheduled_at is None and pending:
            group.times.scheduled_at = self._clock()

    def _add_chunk(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> None:
        """Adds a chunk, with drafts after a sequence's last token if they are worth their time."""
        drafts, end = self._drafts, sequence.num_scheduled + num_tokens
        ends = end == len(sequence.token_ids)
        if drafts is None or not ends or not may_draft(sequence):
            plan.add_chunk(sequence, num_tokens)
            return
        draft_tokens: tuple[int, ...] = ()
        if sequence.num_scheduled >= sequence.group.num_prompt:
            room = min(plan.budget - plan.num_reserved, self._config.max_chunk)
            draft_tokens = drafts.draft(sequence, room - num_tokens)
        num_proposals = drafts.num_proposals(sequence, len(draft_tokens))
        num_writable = self._make_room(sequence, end, len(draft_tokens) + num_proposals, plan)
        draft_tokens = draft_tokens[:num_writable]
        num_proposals = min(num_proposals, num_writable - len(draft_tokens))
        budget = max(0, plan.draft_budget - num_tokens)
        work = drafts.work(sequence, num_proposals, budget)
        may_decode = not (draft_tokens or work or drafts.should_wait(sequence))
        plan.add_chunk(sequence, num_tokens, draft_tokens, may_decode=may_decode, draft_work=work)

    def _make_room(self, sequence: Sequence, end: int, num_tokens: int, plan: StepPlan) -> int:
        """Makes positions from `end` on writable, as many of `num_tokens` as possible without
        blocks that other groups need; returns their number.
        """
        assert sequence.table is not None
        lacks_room = not self._kv.can_append(sequence.table, end, end + num_tokens, are_drafts=True)
        others_need_it = self._queues.waiting and self._queues.num_seats < self._config.max_running
        if lacks_room or others_need_it:
            num_tokens = min(num_tokens, -end % self._config.block_size)  # in the last block
        if num_tokens:
            changes = self._kv.append(sequence.table, end, end + num_tokens, are_drafts=True)
            plan.update_tables(sequence, changes)
        return num_tokens

    def run_alone(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Plans a step of one group, which waits or runs. All others pause, and keep their blocks.

        No step may be in flight. Nothing is planned if the group lacks blocks or seats.
        """
        for sequence in list(self._decoding):
            self._stop_decoding(sequence, self._decoding.position(sequence, plan.step), plan)
            self._queues.chunking[sequence.group] = None
        if group.state is GroupState.RUNNING:
            self.run_chunks(group, plan)
        elif self._has_seats(group):
            self._admit_any(group, plan)

    def _stop_decoding(self, sequence: Sequence, position: int, plan: StepPlan) -> None:
        plan.budget += self._decoding.runs_in(sequence, plan.step)
        self._decoding.leave(sequence)
        sequence.settle()
        sequence.num_scheduled = position
        self._note_decoded(sequence, position)

    def _note_decoded(self, sequence: Sequence, position: int) -> None:
        """Notes that steps were started for the tokens of a decoding sequence up to `position`."""
        if self._kv.states is not None and sequence.table is not None:
            self._kv.states.note_decoded(sequence.table, position)

    def _exceeds_partial(self, num_tokens: int, plan: StepPlan) -> bool:
        """Returns whether the step already computes parts of as many prompts as it may."""
        is_partial = num_tokens > self._room_for(num_tokens, plan)
        return is_partial and plan.num_partial >= self._config.max_num_partial_prefills

    def _room_for(self, num_tokens: int, plan: StepPlan) -> int:
        """Returns how many of a sequence's `num_tokens` known tokens the step has room for."""
        return min(plan.room_for(num_tokens), self._config.max_chunk)

    def _extend(self, sequence: Sequence, start: int, end: int, plan: StepPlan) -> bool:
        """Makes positions `start` to `end` writable; preempts other groups if necessary."""
        assert sequence.table is not None
        if not self._preemption.make_room(sequence.group, sequence.table, start, end, plan):
            return False
        if sequence.is_row_new:
            # As it was before: what a step reads may lie where the next state does not stay.
            sequence.is_row_new = False
            plan.update_tables(sequence, self._kv.whole(sequence.table))
        plan.update_tables(sequence, self._kv.append(sequence.table, start, end))
        return True

    # Waiting groups.

    def start_loads(self) -> None:
        """Admits the waiting groups that have KV to load. No step may be in flight."""
        if self._queues.waiting and self._transfers.loads.may_find:
            self.admit_waiting(StepPlan(step=0, budget=0))

    def admit_waiting(self, plan: StepPlan) -> None:
        """Admits waiting groups in order of importance.

        It stops at the first group that lacks blocks, or that steps in flight still compute, as it
        was preempted a moment ago. A group that lacks seats, as it has many candidates, lets as
        many others overtake it as the engine has seats; then it stops there. It passes over groups
        that wait for anything else.
        """
        loads = self._transfers.loads
        first = self._queues.waiting[: self._config.max_running]
        if loads.looks_up:
            for group in first:
                loads.num_loadable(group)  # starts look-ups, so that they run during this step
        wide: SequenceGroup | None = None
        for group in first:
            if self._kv.is_pending(group.stopped_at):
                break  # steps in flight still draw tokens for it, which must not count
            if wide is not None and not self._may_overtake(group, wide):
                break
            if not self._has_seats(group):
                wide = wide or group
                continue
            # A swapped group goes on to decode, which needs no budget for prompts.
            is_full = plan.is_full if group.swapped is None else plan.budget <= 0
            if is_full and (group.swapped is not None or not loads.may_find):
                break  # without budget, groups can only start to load
            if not self._admit_any(group, plan):
                break
            if wide is not None and group.num_held_seats:
                wide.num_overtaken += 1

    def _may_overtake(self, group: SequenceGroup, wide: SequenceGroup) -> bool:
        """Returns whether a group may take seats though a more important one lacks some."""
        has_seats = self._queues.num_seats < self._config.max_running
        is_as_urgent = group.request.spec.priority <= wide.request.spec.priority
        return has_seats and is_as_urgent and wide.num_overtaken < self._config.max_running

    def _has_seats(self, group: SequenceGroup) -> bool:
        return self._queues.num_seats + group.num_seats <= self._config.max_running

    def _admit_any(self, group: SequenceGroup, plan: StepPlan) -> bool:
        admit = self._admit if group.swapped is None else self._return_swapped
        return admit(group, plan)

    def _admit(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Admits a group or passes it over; returns False if it lacks blocks."""
        loads = self._transfers.loads
        num_loadable = loads.num_loadable(group)
        if num_loadable is None:
            return True
        lead = group.lead
        num_tokens = len(lead.token_ids)
        keys = lead.keys.extend_pool(lead.token_ids)
        if group.owes_prompt_logprobs:
            keys = []  # finds nothing: logits of cached tokens are not computed
        num_loaded = loads.num_loaded_tokens(group, num_loadable)
        if num_loaded == 0 and not self._may_compute(keys, num_tokens, plan):
            return True
        match = self._kv.match_prefix(keys, num_tokens)
        num_cached = match.num_blocks * self._config.block_size
        num_queued = self._queues.num_begun_tokens
        num_missing = max(0, num_loaded - num_cached)
        if num_missing:
            if not loads.is_worth_loading(group, num_missing, num_queued):
                return self._admit(group, plan)  # now it has nothing to load
            match = self._kv.match_prefix(keys, num_tokens, num_loaded=num_loaded)
            num_cached = match.num_blocks * self._config.block_size
        else:
            num_loaded = 0
            if plan.is_full or self._exceeds_partial(num_tokens - num_cached, plan):
                return True
            if self._is_being_computed(group, match.num_blocks):
                return True
        is_alone = self._queues.is_idle
        allocation = self._kv.can_admit(num_tokens, match, num_loaded=num_loaded, alone=is_alone)
        assert allocation is not Allocation.NEVER, "requests that never fit are refused before"
        if allocation is Allocation.LATER:
            self._transfers.lends.stop()
            return False
        self._queues.stop_waiting(group)
        lead.table = self._kv.admit(num_tokens, match, num_loaded=num_loaded)
        lead.num_computed = lead.num_scheduled = num_cached
        group.num_matched = match.num_blocks
        self._branches.seat(lead)
        if loads.start(group, num_loadable, num_missing, num_queued):
            self._queues.start_loading(group)
        else:
            self._start_running(group, plan)
        return True

    def _start_running(self, group: SequenceGroup, plan: StepPlan) -> None:
        self._queues.start_running(group)
        self.run_chunks(group, plan)

    def _may_compute(self, keys: abc.Sequence[bytes], num_tokens: int, plan: StepPlan) -> bool:
        """Returns whether the step may have room for the tokens that are not cached.

        It looks up one key only, as matching every waiting prompt in every step would be slow.
        """
        if plan.is_full:
            return False
        if not self._exceeds_partial(num_tokens, plan):
            return True
        num_beyond = num_tokens - self._room_for(num_tokens, plan)
        num_blocks = -(-num_beyond // self._config.block_size)
        return num_blocks <= len(keys) and self._kv.pool.lookup(keys[num_blocks - 1], 0) is not None

    def _is_being_computed(self, group: SequenceGroup, index: int) -> bool:
        """Returns whether a more important group computes the prompt's block `index`.

        Then that group computes all blocks before it, too, and caches them in a few steps. It is
        better to wait than to compute them twice.
        """
        keys = group.lead.keys.pool_keys
        most_cached = (len(group.lead.token_ids) - 1) // self._config.block_size
        finds_none = not self._config.enable_prefix_caching or group.owes_prompt_logprobs
        if finds_none or index >= most_cached:
            return False
        return any(
            other.order < group.order
            and index < len(other.lead.keys.pool_keys)
            and other.lead.num_computed <= index * self._config.block_size
            and other.lead.keys.pool_keys[index] == keys[index]
            for other in self._queues.chunking
        )

    def _return_swapped(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Copies a group's KV back from the host; returns False if it lacks blocks."""
        assert group.swapped is not None
        is_alone = self._queues.is_idle
        # Each sequence may soon need another block; without it, the group would be preempted again.
        num_extra = 0 if is_alone else len(group.swapped.tables) * self._kv.spec.num_layer_groups
        answer = self._kv.can_swap_in(group.swapped, num_extra=num_extra, alone=is_alone)
        if answer is not Allocation.OK:
            return False  # alone, it fits
        self._queues.stop_waiting(group)
        tables = self._kv.swap_in(group.swapped, plan.step)
        group.swapped = None
        group.is_returning = True
        plan.swapped.append(group)
        for sequence, table in zip(group.running, tables, strict=True):
            sequence.table = table
            self._branches.release_behind(sequence)
            self._branches.seat(sequence)
        for sequence in [s for s in group.branches if s.is_given_up]:
            group.branches.remove(sequence)
            self._branches.drop(sequence)
            self._queues.leave_seat(group)
        self._start_running(group, plan)
        return True
