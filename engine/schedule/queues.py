"""`GroupQueues`: the waiting, loading and running groups, and their seats. Pure."""

import logging
from bisect import bisect_left, insort
from collections import abc

from engine.groups.group import GroupState, SequenceGroup, order_of
from engine.kv_cache.manager import KvCacheManager
from engine.kv_transfer.transfers import TOO_SLOW, Transfers
from engine.metrics.counts import EngineMetrics
from engine.schedule.branches import Branches

__all__ = ["GroupQueues"]

_logger = logging.getLogger("baton.engine")


class GroupQueues:
    """Every request of one scheduler that has not had its last output.

    Args:
        kv: the block tables.
        transfers: what groups load and save.
        branches: rows of sequences.
        metrics: counts the requests.

    Attributes:
        groups: all groups, by request id.
        chunking: running groups with sequences that do not decode. A group without any stays
            here until its next step.
        num_seats: the most sequences that running and loading groups run at once.
    """

    def __init__(
        self, kv: KvCacheManager, transfers: Transfers, branches: Branches, metrics: EngineMetrics
    ) -> None:
        self._kv = kv
        self._transfers = transfers
        self._branches = branches
        self._metrics = metrics
        self.groups: dict[str, SequenceGroup] = {}
        self.chunking: dict[SequenceGroup, None] = {}
        self.num_seats = 0
        self._waiting: list[SequenceGroup] = []  # sorted by order, swapped ones included
        self._running: list[SequenceGroup] = []  # sorted by order
        self._num_loading = 0
        self._is_slow_logged = False  # since the last load that succeeded

    @property
    def waiting(self) -> abc.Sequence[SequenceGroup]:
        """Groups without blocks in the pool, swapped ones included; the most important first."""
        return self._waiting

    @property
    def running(self) -> abc.Sequence[SequenceGroup]:
        """Groups that run in steps; the most important first."""
        return self._running

    @property
    def is_idle(self) -> bool:
        """Whether no group holds blocks of the pool."""
        return not self._running and not self._num_loading

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return sum(len(group.running) for group in self._running)

    @property
    def may_run(self) -> bool:
        """Whether groups run, or may be admitted by the next step."""
        return bool(self._running or self._waiting)

    def num_leaving(self, limit: int) -> int:
        """Returns how many groups run or wait here and will decode in another engine.

        Args:
            limit: of the groups that wait, how many are counted.
        """
        return sum(group.hands_over for group in (*self._running, *self._waiting[:limit]))

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks or for a load."""
        return len(self._waiting) + self._num_loading

    @property
    def num_loading(self) -> int:
        """Waiting requests that wait for a KV load."""
        return self._num_loading

    @property
    def num_swapped(self) -> int:
        """Waiting requests with their KV on the host."""
        return sum(group.swapped is not None for group in self._waiting)

    @property
    def num_awaited_blocks(self) -> int:
        """Upper bound of the blocks that waiting groups need to be admitted."""
        return sum(map(self._num_needed, self._waiting))

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return sum(group.num_queued_prompt for group in (*self.chunking, *self._waiting))

    @property
    def num_begun_tokens(self) -> int:
        """Prompt tokens that are not computed yet, of running groups only."""
        return sum(group.num_queued_prompt for group in self.chunking)

    # Towards running.

    def add(self, group: SequenceGroup) -> None:
        """Adds a new group, which does not wait for admission yet."""
        self.groups[group.request_id] = group

    def wait_for_admission(self, group: SequenceGroup) -> None:
        """Makes a group wait for blocks in the pool."""
        group.state = GroupState.WAITING
        insort(self._waiting, group, key=order_of)

    def stop_waiting(self, group: SequenceGroup) -> None:
        """Admits a waiting group, whose blocks are there: it occupies its seats."""
        _remove(self._waiting, group)
        group.num_held_seats = group.num_seats
        self._count_seats(group.num_held_seats)

    def start_loading(self, group: SequenceGroup) -> None:
        """Lets an admitted group wait for the load into its blocks."""
        group.state = GroupState.LOADING
        self._num_loading += 1

    def end_load(self, group: SequenceGroup, *, failure: str) -> None:
        """Ends a group's load: it runs, or waits to compute if the load failed."""
        self._num_loading -= 1
        if not failure:
            self._is_slow_logged = False
            self.start_running(group)
            return
        # The connector logs an outage of its backend once for all requests, as is done here for
        # loads that are too slow, which an outage begins with.
        is_slow = failure == TOO_SLOW
        is_logged = failure == "unavailable" or (is_slow and self._is_slow_logged)
        self._is_slow_logged |= is_slow
        level = logging.DEBUG if is_logged else logging.WARNING
        _logger.log(level, "%s: KV load failed (%s), computing", group.request_id, failure)
        self._start_over(group)

    def start_running(self, group: SequenceGroup) -> None:
        """Makes an admitted group run in steps."""
        group.state = GroupState.RUNNING
        if group.num_cached is None:
            group.num_cached = min(group.lead.num_computed, group.num_prompt)
            num_local = min(group.num_matched * self._kv.spec.block_size, group.num_cached)
            num_loaded, is_pulled = group.num_cached - num_local, group.is_pulled
            self._metrics.admitted(group.num_prompt, num_local, num_loaded, is_pulled=is_pulled)
        insort(self._running, group, key=order_of)
        self.chunking[group] = None

    # Preemption.

    def stop_running(self, group: SequenceGroup) -> None:
        """Stops a group: its sequences lose their rows and their tokens in flight."""
        _remove(self._running, group)
        self.chunking.pop(group, None)
        group.stopped_at = self._kv.newest_step
        self._transfers.loads.forget(group)
        self._transfers.saves.take_back(group)
        for sequence in group.running:
            self._branches.unseat(sequence)
            sequence.num_scheduled = sequence.num_computed

    def rewind(self, group: SequenceGroup) -> bool:
        """Takes a stopped group's sequences back to where they can go on after a swap.

        Without states that is where they are. With them, steps in flight have applied further
        tokens to the current ones, so it is the last state that was kept.

        Returns:
            Whether all sequences have such a place.
        """
        states = self._kv.states
        if states is None:
            return True
        running = [(s, s.table) for s in group.running if s.table is not None]
        ends = [states.kept_end(table, sequence.num_computed) for sequence, table in running]
        if not all(ends):
            return False
        group.beam_tops.clear()  # all beams draw again
        for (sequence, table), end in zip(running, ends, strict=True):
            self._branches.register(sequence)
            states.rewind(table, end)
            sequence.num_computed = sequence.num_scheduled = end
        return True

    def wait_swapped(self, group: SequenceGroup) -> None:
        """Makes a stopped group wait, whose KV is on the host."""
        for sequence in group.running:
            sequence.table = None
        self._free_seats(group)
        group.state = GroupState.SWAPPED
        insort(self._waiting, group, key=order_of)

    def wait_again(self, group: SequenceGroup) -> None:
        """Frees the blocks of a stopped group and makes it wait to compute again."""
        group.beam_tops.clear()
        self._start_over(group)

    def start_over(self, group: SequenceGroup) -> None:
        """Makes a group compute again whose step has failed, so that its blocks are not sound.

        From now on it loads nothing. Groups that have left the queues are ignored.
        """
        match group.state:
            case GroupState.RUNNING:
                self.stop_running(group)
            case GroupState.WAITING | GroupState.SWAPPED:
                _remove(self._waiting, group)
            case _:
                return
        if group.swapped is not None:
            self._kv.drop_swapped(group.swapped)
            group.swapped = None
            group.branches = [s for s in group.branches if not s.is_given_up]
        self._transfers.loads.exclude(group)
        self.wait_again(group)

    # The end.

    def withdraw(self, group: SequenceGroup) -> None:
        """Removes a group from every queue and frees what it holds."""
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
        self._transfers.loads.forget(group)
        self._release(group)

    def forget(self, group: SequenceGroup) -> None:
        """Removes a request that has had its last output."""
        self.withdraw(group)
        self._transfers.saves.abandon(group)
        group.state = GroupState.FINISHED
        del self.groups[group.request_id]

    def leave_seat(self, group: SequenceGroup) -> None:
        """Frees the seat of a sequence that has ended."""
        if group.num_held_seats:
            group.num_held_seats -= 1
            self._count_seats(-1)

    def _num_needed(self, group: SequenceGroup) -> int:
        if group.swapped is not None:
            return len(group.swapped.host_blocks)
        return self._kv.spec.blocks_for(len(group.lead.token_ids))

    def _start_over(self, group: SequenceGroup) -> None:
        self._release(group)
        group.make_root()
        group.state = GroupState.WAITING
        insort(self._waiting, group, key=order_of)

    def _release(self, group: SequenceGroup) -> None:
        """Frees the rows, seats and blocks of a group's sequences."""
        for sequence in group.running:
            self._branches.drop(sequence)
            sequence.restart()
        self._free_seats(group)

    def _free_seats(self, group: SequenceGroup) -> None:
        self._count_seats(-group.num_held_seats)
        group.num_held_seats = 0

    def _count_seats(self, change: int) -> None:
        self.num_seats += change
        if self._kv.states is not None:
            self._kv.states.num_reserved = self.num_seats


def _remove(groups: list[SequenceGroup], group: SequenceGroup) -> None:
    """Removes a group from a sorted list."""
    index = bisect_left(groups, group.order, key=order_of)
    assert groups[index] is group
    del groups[index]
