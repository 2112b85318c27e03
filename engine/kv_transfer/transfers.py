"""`Transfers`: ties requests to the KV connector's scheduler half. Pure.

`loads`, `prefetches` and `saves`, beside this file, decide what moves. Here jobs get their
deadlines: one that does not report in time is given up, and its request goes
on without it. Its blocks stay held, since whoever moves the bytes may still be
at it. So is a load that takes longer than computing would (`engine.kv_transfer.costs`).

How much of a prompt's transfer runs while the prompt is computed. Pure.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable

from engine.group import Sequence, SequenceGroup
from engine.kv_cache.manager import KvCacheManager
from engine.kv_transfer.blocks import TransferBlocks
from engine.kv_transfer.costs import LoadCosts
from engine.kv_transfer.loads import FinishedLoad, GivenUp, Loads
from engine.kv_transfer.prefetches import Prefetches
from engine.kv_transfer.saves import SavePolicy, Saves
from kvstore.connector import KvConnectorScheduler
from kvstore.handoff import KvHandoff
from kvstore.jobs import ConnectorWork, LoadResult, SaveResult, TransferResults
from kvstore.metrics import TransferMetrics

__all__ = ["FinishedLoad", "Transfers", "overlap"]

# What becomes of loads that nobody waits for any more.
_TIMED_OUT = "timed out"
_UNAVAILABLE = "unavailable"
_TOO_SLOW = "slower than computing"

_logger = logging.getLogger("baton.engine")


class Transfers:
    """Loads and saves of all requests of one scheduler.

    Args:
        connector: the scheduler half; None runs without a connector, and then every
            method does nothing.
        kv: the KV cache manager.
        block_size: tokens of a transfer block.
        namespace: digest that block keys are rooted in.
        policy: what is published.
        timeout_s: how long a request waits for a job.
        costs: of loads, beside those of computing.
        metrics: where to count what the connector's worker half does not see.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler | None,
        kv: KvCacheManager,
        *,
        block_size: int,
        namespace: bytes,
        policy: SavePolicy,
        timeout_s: float,
        costs: LoadCosts,
        metrics: TransferMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._connector = connector
        self._timeout_s = timeout_s
        self._costs = costs
        self._metrics = metrics
        self._clock = clock
        self._unstarted: list[int] = []
        self._started: deque[tuple[float, int]] = deque()  # (give up at, job id)
        self._ahead: dict[int, list[int]] = {}  # saves of a step that is not over, by its number
        self._saving_since: dict[int, float] = {}
        if connector is not None:
            cut = TransferBlocks(kv.spec, block_size)
            self._prefetches = Prefetches(connector, kv, cut, self._unstarted.append)
            self._loads = Loads(connector, kv, cut, self._prefetches, self._unstarted.append)
            self._saves = Saves(
                connector,
                kv.pool,
                cut,
                namespace=namespace,
                policy=policy,
                on_job=self._add_save,
            )

    @property
    def is_connected(self) -> bool:
        """Whether there is a connector to ask."""
        return self._connector is not None

    @property
    def in_flight(self) -> int:
        """Jobs whose result is not in."""
        if not self.is_connected:
            return 0
        return self._loads.in_flight + self._prefetches.in_flight + self._saves.in_flight

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is next due."""
        while self._started and not self._is_open(self._started[0][1]):
            self._started.popleft()
        both = (self._started[0][0] if self._started else None, self._costs.next_give_up)
        return min((deadline for deadline in both if deadline is not None), default=None)

    def held_blocks(self) -> list[int]:
        """One entry per reference that a job holds."""
        if not self.is_connected:
            return []
        parts = (self._loads, self._prefetches, self._saves)
        return [block for part in parts for block in part.held_blocks()]

    # Requests come and go.

    def accept(self, group: SequenceGroup) -> None:
        """A request has come; see `Loads.accept`."""
        if self.is_connected:
            for job_id in self._loads.accept(group):
                self._costs.wait(job_id, self._clock())

    def forget(self, group: SequenceGroup) -> None:
        """The group has left the scheduler's queues, or starts over."""
        if self.is_connected:
            self._loads.forget(group)

    def take_back(self, group: SequenceGroup) -> None:
        """The group gives way; see `Saves.take_back`."""
        if self.is_connected:
            self._saves.take_back(group)

    def yield_lent(self, group: SequenceGroup) -> None:
        """The group waits for blocks that nobody else holds; see `Saves.yield_lent`."""
        if self.is_connected:
            self._saves.yield_lent(group)

    def abandon(self, group: SequenceGroup) -> None:
        """The request is over; see `Saves.abandon`."""
        if self.is_connected:
            self._saves.abandon(group)

    # Loads.

    def num_loadable(self, group: SequenceGroup) -> int | None:
        """Leading transfer blocks that the connector can load; None: ask again next step."""
        return self._loads.num_loadable(group) if self.is_connected else 0

    def num_loaded_tokens(self, group: SequenceGroup, num_loadable: int) -> int:
        """Tokens that a load of the first `num_loadable` transfer blocks brings."""
        return self._loads.num_loaded_tokens(group, num_loadable) if self.is_connected else 0

    def is_worth_loading(
        self, group: SequenceGroup, num_tokens: int, num_queued_tokens: int
    ) -> bool:
        """Whether the group had better load so many tokens' KV than compute it. If not, it
        loads nothing from now on.

        Args:
            group: a group that waits for its turn.
            num_tokens: one or more.
            num_queued_tokens: others that would be computed before them.
        """
        if self._costs.may_load(num_tokens, num_queued_tokens, self._clock()):
            return True
        self._loads.decline(group)
        self._metrics.load_given_up("admission")
        return False

    def start_load(
        self, group: SequenceGroup, num_loadable: int, num_queued_tokens: int = 0
    ) -> bool:
        """Loads what the admitted group lacks; see `Loads.start` and `is_worth_loading`."""
        num_computed = group.lead.num_computed
        num_tokens = self.num_loaded_tokens(group, num_loadable) - num_computed
        if not self.is_connected or not self._loads.start(group, num_loadable):
            return False
        assert group.load_job is not None
        now = self._clock()
        self._costs.start(group.load_job, num_tokens, num_queued_tokens, now)
        self._costs.wait(group.load_job, now)
        return True

    def prefetch(self, handoff: KvHandoff, num_reserved: int) -> None:
        """Begins to load blocks into the prefix cache; see `Prefetches.start`."""
        now = self._clock()
        if not self.is_connected or not self._costs.may_load(handoff.num_tokens, 0, now):
            return
        prefetch = self._prefetches.start(handoff, num_reserved)
        if prefetch is not None:
            job_id, num_tokens = prefetch
            self._costs.start(job_id, num_tokens, 0, now)

    def stop_prefetches(self) -> int:
        """A running sequence lacks blocks; see `Prefetches.stop`."""
        return self._prefetches.stop() if self.is_connected else 0

    # Saves.

    def save_computed(self, group: SequenceGroup) -> None:
        """Publishes what is computed of a prompt; see `Saves.save_computed`."""
        if self.is_connected:
            self._saves.save_computed(group)

    def save_ahead(self, group: SequenceGroup, step: int) -> None:
        """Publishes what a step to come computes of a prompt; see `Saves.save_ahead`."""
        if self.is_connected:
            self._saves.save_ahead(group, step)

    def step_ended(self, step: int) -> None:
        """A step is over: what was to be saved of it has `timeout_s` from now on."""
        give_up_at = self._clock() + self._timeout_s
        self._started.extend((give_up_at, job_id) for job_id in self._ahead.pop(step, ()))

    def save_filled(self, sequence: Sequence) -> None:
        """Publishes generated blocks that are due; see `Saves.save_filled`."""
        if self.is_connected:
            self._saves.save_filled(sequence)

    def save_ended(self, sequence: Sequence) -> None:
        """Publishes what a sequence leaves; see `Saves.save_ended`."""
        if self.is_connected:
            self._saves.save_ended(sequence)

    def save_for_handoff(self, group: SequenceGroup) -> None:
        """Publishes the prompt's partial tail, and makes its handoff."""
        assert self.is_connected, "prefill engines have a connector"
        self._saves.save_for_handoff(group)

    def take_progress(self, group: SequenceGroup) -> KvHandoff | None:
        """What others can load by now; see `Saves.take_progress`."""
        return self._saves.take_progress(group) if self.is_connected else None

    def commit_handoff(self, group: SequenceGroup) -> KvHandoff | None:
        """The handoff of a group whose saves have ended; None if one failed."""
        handoff = self._saves.commit_handoff(group)
        if handoff is not None and group.first_token_at is not None:
            self._metrics.prompt_saved(*overlap(group.save_times, group.first_token_at))
        return handoff

    def release_handoff(self, handoff_id: str) -> None:
        """Gives back what was saved for one handoff alone; see `Saves.end_handoff`."""
        if self.is_connected:
            self._saves.end_handoff(handoff_id)

    def discard_saved(self, group: SequenceGroup) -> None:
        """Takes back what the group has published: it must not be loaded."""
        group.is_poisoned = True
        if self.is_connected:
            self._saves.discard(group)

    # What becomes of jobs.

    def apply(self, results: TransferResults) -> tuple[list[FinishedLoad], list[SequenceGroup]]:
        """Takes in results; drops the jobs' references.

        Returns:
            Loads that groups still wait for, and groups of which a save has ended.
        """
        if self._connector is None:
            return [], []
        results = self._connector.update(results)
        for lookup in results.lookups:
            self._loads.finish_lookup(lookup)
        loads = [finished for r in results.loads if (finished := self._finish_load(r))]
        for job_id in filter(self._is_open, results.doubted):
            self._costs.drop(job_id)
            given_up = self._give_up_load(job_id, _UNAVAILABLE)
            loads += [given_up.load] if given_up.load else []
        saved = dict.fromkeys(self._finish_save(result) for result in results.saves)
        for job_id in results.released:
            self._saves.release(job_id)
        return loads, list(saved)

    def expire(self, now: float) -> tuple[list[FinishedLoad], list[SequenceGroup]]:
        """Gives up jobs that have not reported in time; as `apply`."""
        loads: list[FinishedLoad] = []
        saved: dict[SequenceGroup, None] = {}
        while self._started and self._started[0][0] <= now:
            _, job_id = self._started.popleft()
            if self._saves.is_open(job_id):
                group, num_blocks = self._saves.give_up(job_id)
                self._tell_overdue(GivenUp("save", group, num_blocks))
                saved[group] = None
            elif self._is_open(job_id):
                given_up = self._give_up_load(job_id, _TIMED_OUT)
                self._tell_overdue(given_up)
                self._costs.drop(job_id)
                loads += [given_up.load] if given_up.load else []
        return loads + self._give_up_slow(now), list(saved)

    def build_work(self, now: float) -> ConnectorWork:
        """What the worker half must start now."""
        if self._connector is None:
            return ConnectorWork()
        waiting = {job_id for job_ids in self._ahead.values() for job_id in job_ids}
        give_up_at = now + self._timeout_s
        self._started.extend(
            (give_up_at, job_id) for job_id in self._unstarted if job_id not in waiting
        )
        saves = [job_id for job_id in self._unstarted if self._saves.is_open(job_id)]
        self._saving_since.update(dict.fromkeys(saves, now))
        self._unstarted.clear()
        return self._connector.build_work()

    def _add_save(self, job_id: int, step: int) -> None:
        self._unstarted.append(job_id)
        if step:
            self._ahead.setdefault(step, []).append(job_id)

    def _finish_load(self, result: LoadResult) -> FinishedLoad | None:
        """What a load took tells what others will take, if all of it came."""
        if result.error:
            self._costs.drop(result.job_id)
        else:
            self._costs.end(result.job_id, self._clock(), result.seconds)
        if self._prefetches.is_open(result.job_id):
            self._prefetches.finish(result)
            return None
        return self._loads.finish(result)

    def _finish_save(self, result: SaveResult) -> SequenceGroup:
        group = self._saves.finish(result)
        since = self._saving_since.pop(result.job_id) + result.waited
        if group.hands_over:
            end = since + result.seconds if result.seconds else self._clock()
            group.save_times.append((since, end))
        return group

    def _give_up_load(self, job_id: int, error: str) -> GivenUp:
        """Ends the wait for a look-up, a load or a prefetch."""
        if self._prefetches.is_open(job_id):
            return GivenUp("load", None, self._prefetches.give_up(job_id))
        return self._loads.give_up(job_id, error)

    def _give_up_slow(self, now: float) -> list[FinishedLoad]:
        """Ends the wait for loads that take longer than computing would."""
        given_up = [self._give_up_load(job_id, _TOO_SLOW) for job_id in self._costs.give_up(now)]
        loads = [each.load for each in given_up if each.load is not None]
        for _ in loads:
            self._metrics.load_given_up("loading")
        return loads

    def _is_open(self, job_id: int) -> bool:
        parts = (self._loads, self._prefetches, self._saves)
        return any(part.is_open(job_id) for part in parts)

    def _tell_overdue(self, job: GivenUp) -> None:
        _logger.error(
            "%s: a KV %s has not reported for %s s; going on without it, %d blocks stay fenced",
            job.group.request_id if job.group else "a request that is yet to come",
            job.what,
            self._timeout_s,
            job.num_blocks,
        )
        if job.what != "look-up":
            self._metrics.failed(job.what, _TIMED_OUT)


def overlap(intervals: Iterable[tuple[float, float]], until: float) -> tuple[float, float]:
    """Seconds in which one or more intervals were open, and those of them before `until`.

    Args:
        intervals: starts and ends, in any order; they may overlap.
        until: on the same clock.
    """
    total_s = hidden_s = 0.0
    covered = float("-inf")
    for start, end in sorted(intervals):
        first = max(start, covered)
        if end > first:
            total_s += end - first
            hidden_s += max(0.0, min(end, until) - first)
            covered = end
    return total_s, hidden_s
