"""`Transfers`: the KV connector's jobs for requests, and how they end. Pure.

`loads`, `prefetches` and `saves` decide what moves; the scheduler calls them directly. Their jobs
are in one table (`engine.kv_transfer.jobs`). Here results and deadlines end them, and metrics
count them.
"""

import logging
import math
from collections.abc import Callable

from engine.groups.group import SequenceGroup
from engine.kv_cache.manager import KvCacheManager
from engine.kv_transfer.blocks import TransferBlocks
from engine.kv_transfer.costs import LoadCosts
from engine.kv_transfer.jobs import BaseLoad, Job, JobTable, Lend, Load, Lookup, Prefetch, Save
from engine.kv_transfer.lends import Lends
from engine.kv_transfer.loads import FinishedLoad, Loads
from engine.kv_transfer.prefetches import Prefetches
from engine.kv_transfer.save_policy import SavePolicy
from engine.kv_transfer.saves import Saves
from kvstore.connector import KvConnectorScheduler
from kvstore.guard.metrics import TransferMetrics
from kvstore.jobs import ConnectorWork, LoadResult, SaveResult, TransferResults

__all__ = ["TOO_SLOW", "Transfers"]

# Why a request does not wait for its load any longer.
_TIMED_OUT = "timed out"
_UNAVAILABLE = "unavailable"
TOO_SLOW = "slower than computing"

_logger = logging.getLogger("baton.engine")


class Transfers:
    """Transfers of all requests of one scheduler.

    Args:
        connector: the scheduler half.
        kv: the KV cache manager.
        block_size: tokens per transfer block.
        num_units: transfer blocks that a slot with states is moved as.
        namespace: digest that block keys are rooted in.
        policy: what is saved.
        timeout_s: how long a job may take to report.
        costs: estimates of loads against computing.
        metrics: counts jobs.
        clock: monotonic seconds.

    Attributes:
        jobs: all jobs.
        loads: look-ups and loads of requests.
        prefetches: loads into the prefix cache.
        saves: saves and handoffs of requests.
        lends: prefixes of the prefix cache that other engines load.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler,
        kv: KvCacheManager,
        *,
        block_size: int,
        num_units: int = 0,
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
        self.jobs = jobs = JobTable(timeout_s)
        cut = TransferBlocks(kv.spec, block_size, kv.pool.num_blocks, num_units)
        self.prefetches = Prefetches(connector, kv, cut, jobs, costs, clock)
        self.loads = Loads(connector, kv, cut, jobs, self.prefetches, costs, metrics, clock)
        self.saves = Saves(
            connector,
            kv,
            cut,
            jobs,
            namespace=namespace,
            policy=policy,
            metrics=metrics,
        )
        self.lends = Lends(connector, kv, cut, jobs, namespace)

    @property
    def load_tokens_per_s(self) -> float:
        """Tokens whose KV loads have brought per second; 0 unless some ended lately."""
        return self._costs.tokens_per_s(self._clock())

    def build_work(self, now: float) -> ConnectorWork:
        """Returns what the worker half must start now."""
        self.jobs.start_added(now)
        return self._connector.build_work()

    def step_ended(self, step: int) -> None:
        """Starts the timeout of saves whose blocks the step has computed."""
        self.jobs.step_ended(step, self._clock())

    def apply(self, results: TransferResults) -> tuple[list[FinishedLoad], list[SequenceGroup]]:
        """Ends the jobs that have a result, and releases their blocks.

        Returns:
            The ends of loads that requests wait for, and the groups of saves that have ended.
        """
        now = self._clock()
        self._count(results, now)
        results = self._connector.update(results)
        for lookup in results.lookups:
            job = self.jobs.open.pop(lookup.job_id, None)
            if isinstance(job, Lookup) and not lookup.error:  # None: it was cancelled
                self.loads.finish_lookup(job)
        ended = [self._finish_load(result, now) for result in results.loads]
        ended += [self._doubt_load(job_id) for job_id in results.doubted]
        finished = [self._finish_save(result, now) for result in results.saves]
        saved = dict.fromkeys(group for group in finished if group is not None)
        for job_id in results.released:
            self.saves.release(job_id)
        return [load for load in ended if load is not None], list(saved)

    def expire(self, now: float) -> tuple[list[FinishedLoad], list[SequenceGroup]]:
        """Gives up jobs whose result is overdue, and loads slower than computing.

        Returns:
            As `apply`.
        """
        overdue, too_slow = self.jobs.take_due(now)
        ended: list[FinishedLoad | None] = []
        saved: dict[SequenceGroup, None] = {}
        for job in overdue:
            if isinstance(job, Save):
                self.saves.give_up(job)
                saved[job.group] = None
            elif isinstance(job, Lend):
                self.lends.give_up(job)
            else:
                ended.append(self._give_up(job, _TIMED_OUT))
            self._report_overdue(job)
        ended += [self._give_up_slow(job, now) for job in too_slow]
        return [load for load in ended if load is not None], list(saved)

    # Results.

    def _count(self, results: TransferResults, now: float) -> None:
        """Counts jobs that have ended, before the connector's scheduler half merges results.

        A connector over several reports only its members' jobs here, and counts them itself.
        """
        for lookup in results.lookups:
            job = self.jobs.open.get(lookup.job_id)
            if isinstance(job, Lookup):  # else it was cancelled
                self._metrics.looked_up(now - job.started_at, job.num_keys, lookup.num_blocks)
        for job_id in results.doubted:
            self._count_load(job_id, _UNAVAILABLE, now)
        for load in results.loads:
            self._count_load(load.job_id, load.error, now)
        for save in results.saves:
            error = "" if save.committed else save.error or "failed"
            # The time in which the save waited for its step is not the connector's.
            started_at = self.jobs.open[save.job_id].started_at + save.waited
            self._metrics.job_ended("save", now - started_at, error)

    def _count_load(self, job_id: int, error: str, now: float) -> None:
        job = self.jobs.open.get(job_id)
        if isinstance(job, BaseLoad) and not job.is_counted:
            job.is_counted = True
            self._metrics.job_ended("load", now - job.started_at, error)

    def _finish_load(self, result: LoadResult, now: float) -> FinishedLoad | None:
        job = self.jobs.open.pop(result.job_id)
        assert isinstance(job, BaseLoad)
        if job.estimate is not None and not result.error:
            self._costs.end(job.estimate, now, result.seconds)
            job.estimate = None
        self._drop_estimate(job)
        if isinstance(job, Load):
            return self.loads.finish(job, result)
        assert isinstance(job, Prefetch)
        self.prefetches.finish(job, result)
        return None

    def _doubt_load(self, job_id: int) -> FinishedLoad | None:
        """Gives up a load that has failed, and whose blocks may still be written to."""
        job = self.jobs.open.get(job_id)
        return self._give_up(job, _UNAVAILABLE) if job is not None else None

    def _finish_save(self, result: SaveResult, now: float) -> SequenceGroup | None:
        """Ends a save; returns its request, if it has one."""
        job = self.jobs.open.pop(result.job_id)
        if isinstance(job, Lend):
            self.lends.finish(job, result)
            return None
        assert isinstance(job, Save)
        self.saves.finish(job, result, now)
        return job.group

    # Deadlines.

    def _give_up(self, job: Job, error: str) -> FinishedLoad | None:
        """Ends the wait for a look-up, a load or a prefetch."""
        if isinstance(job, BaseLoad):
            self._drop_estimate(job)
        if isinstance(job, Prefetch):
            self.prefetches.give_up(job)
            return None
        assert isinstance(job, Lookup | Load)
        return self.loads.give_up(job, error)

    def _give_up_slow(self, job: BaseLoad, now: float) -> FinishedLoad | None:
        if job.estimate is not None:
            self._costs.give_up(job.estimate, now)
            job.estimate = None
        load = self._give_up(job, TOO_SLOW)
        if load is not None:
            self._metrics.load_given_up("loading")
        return load

    def _drop_estimate(self, job: BaseLoad) -> None:
        job.too_slow_at = math.inf
        if job.estimate is not None:
            self._costs.drop(job.estimate)
            job.estimate = None

    def _report_overdue(self, job: Job) -> None:
        name = "another replica" if isinstance(job, Lend) else "a request that has not come yet"
        if isinstance(job, Lookup | Load | Save):
            name = job.group.request_id
        _logger.error(
            "%s: a KV %s has not reported for %s s; going on without it, %d blocks stay fenced",
            name,
            job.kind,
            self._timeout_s,
            len(job.block_ids),
        )
        if job.kind != "look-up":
            self._metrics.failed(job.kind, _TIMED_OUT)
