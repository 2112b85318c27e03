"""`Transfers`: ties requests to the KV connector's scheduler half. Pure.

`engine.loads` and `engine.saves` decide what moves. Here jobs get their
deadlines: one that does not report in time is given up, and its request goes
on without it. Its blocks stay held, since whoever moves the bytes may still be
at it.
"""

import logging
from collections import deque

from engine.kv_cache_manager import KvCacheManager
from engine.loads import FinishedLoad, Loads
from engine.saves import SavePolicy, Saves
from engine.sequence import Sequence
from engine.sequence_group import SequenceGroup
from kvstore.connector import ConnectorWork, KvConnectorScheduler, TransferResults
from kvstore.handoff import KvHandoff

__all__ = ["FinishedLoad", "Transfers"]

_logger = logging.getLogger("baton.engine")


class Transfers:
    """Loads and saves of all requests of one scheduler.

    Args:
        connector: the scheduler half; None runs without a connector, and then every
            method does nothing.
        kv: the KV cache manager.
        namespace: digest that block keys are rooted in.
        kv_form: see `KvHandoff`.
        policy: what is published.
        timeout_s: how long a request waits for a job.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler | None,
        kv: KvCacheManager,
        *,
        namespace: bytes,
        kv_form: str,
        policy: SavePolicy,
        timeout_s: float,
    ) -> None:
        self._connector = connector
        self._timeout_s = timeout_s
        self._unstarted: list[int] = []
        self._started: deque[tuple[float, int]] = deque()  # (give up at, job id)
        if connector is not None:
            self._loads = Loads(connector, kv, self._unstarted.append)
            self._saves = Saves(
                connector,
                kv.pool,
                kv.spec,
                namespace=namespace,
                kv_form=kv_form,
                policy=policy,
                on_job=self._unstarted.append,
            )

    @property
    def is_connected(self) -> bool:
        """Whether there is a connector to ask."""
        return self._connector is not None

    @property
    def in_flight(self) -> int:
        """Jobs whose result is not in."""
        return self._loads.in_flight + self._saves.in_flight if self.is_connected else 0

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is next due."""
        while self._started and not self._is_open(self._started[0][1]):
            self._started.popleft()
        return self._started[0][0] if self._started else None

    def held_blocks(self) -> list[int]:
        """One entry per reference that a job holds."""
        if not self.is_connected:
            return []
        return self._loads.held_blocks() + self._saves.held_blocks()

    # Requests come and go.

    def accept(self, group: SequenceGroup) -> None:
        """A request has come; see `Loads.accept`."""
        if self.is_connected:
            self._loads.accept(group)

    def forget(self, group: SequenceGroup) -> None:
        """The group has left the scheduler's queues, or starts over."""
        if self.is_connected:
            self._loads.forget(group)

    def abandon(self, group: SequenceGroup) -> None:
        """The request is over; see `Saves.abandon`."""
        if self.is_connected:
            self._saves.abandon(group)

    # Loads.

    def num_loadable(self, group: SequenceGroup) -> int | None:
        """Leading blocks that the connector can load; None: ask again next step."""
        return self._loads.num_loadable(group) if self.is_connected else 0

    def num_loaded_tokens(self, group: SequenceGroup, num_loadable: int) -> int:
        """Tokens that a load of the first `num_loadable` blocks brings."""
        return self._loads.num_loaded_tokens(group, num_loadable) if self.is_connected else 0

    def start_load(self, group: SequenceGroup, num_loadable: int) -> bool:
        """Loads what the admitted group lacks; see `Loads.start`."""
        return self.is_connected and self._loads.start(group, num_loadable)

    def prefetch(self, handoff: KvHandoff) -> None:
        """Begins to load blocks into the prefix cache; see `Loads.prefetch`."""
        if self.is_connected:
            self._loads.prefetch(handoff)

    # Saves.

    def save_computed(self, group: SequenceGroup) -> None:
        """Publishes what is computed of a prompt; see `Saves.save_computed`."""
        if self.is_connected:
            self._saves.save_computed(group)

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
        return self._saves.commit_handoff(group)

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
        loads = [finished for r in results.loads if (finished := self._loads.finish(r))]
        saved = dict.fromkeys(self._saves.finish(result) for result in results.saves)
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
                self._log_overdue("save", group, num_blocks)
                saved[group] = None
            elif self._loads.is_open(job_id):
                waiting, load, num_blocks = self._loads.give_up(job_id)
                self._log_overdue("load", waiting, num_blocks)
                loads += [load] if load else []
        return loads, list(saved)

    def build_work(self, now: float) -> ConnectorWork:
        """What the worker half must start now."""
        if self._connector is None:
            return ConnectorWork()
        self._started.extend((now + self._timeout_s, job_id) for job_id in self._unstarted)
        self._unstarted.clear()
        return self._connector.build_work()

    def _is_open(self, job_id: int) -> bool:
        return self._loads.is_open(job_id) or self._saves.is_open(job_id)

    def _log_overdue(self, what: str, group: SequenceGroup | None, num_blocks: int) -> None:
        _logger.error(
            "%s: a KV %s has not reported for %s s; going on without it, %d blocks stay fenced",
            group.request_id if group else "a request that is over, or yet to come",
            what,
            self._timeout_s,
            num_blocks,
        )
