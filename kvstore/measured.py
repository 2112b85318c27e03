"""`MeasuredWorker`: counts the jobs of a connector."""

import time
from collections.abc import Callable
from typing import Any

from kvstore.connector import KvConnectorWorker
from kvstore.jobs import ConnectorWork, TransferResults
from kvstore.layout import KvLayout
from kvstore.metrics import Direction, KvMetrics, TransferMetrics
from kvstore.transfer_form import WHOLE, HeadShare, TransferForm

__all__ = ["MeasuredWorker"]


class MeasuredWorker(KvConnectorWorker):
    """A worker half whose look-ups, loads and saves are counted.

    Args:
        worker: closed with the wrapper.
        metrics: where to count.
        clock: seconds.
    """

    def __init__(
        self,
        worker: KvConnectorWorker,
        metrics: TransferMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._metrics = metrics
        self._clock = clock
        self._lookups: dict[int, tuple[float, int]] = {}  # started at, number of keys
        self._started_at: dict[tuple[Direction, int], float] = {}

    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: HeadShare = WHOLE,
    ) -> None:
        """See `KvConnectorWorker.register_pool`."""
        self._worker.register_pool(pool, layout, form, share)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `KvConnectorWorker.set_waker`."""
        self._worker.set_waker(wake)

    def measure(self, metrics: KvMetrics, backend: str) -> None:
        """See `KvConnectorWorker.measure`."""
        self._worker.measure(metrics, backend)

    def start(self, work: ConnectorWork) -> None:
        """See `KvConnectorWorker.start`."""
        now = self._clock()
        self._lookups.update((job.job_id, (now, len(job.keys))) for job in work.lookups)
        self._started_at.update((("load", job.job_id), now) for job in work.loads)
        self._started_at.update((("save", job.job_id), now) for job in work.saves)
        for job_id in work.cancelled_lookups:
            self._lookups.pop(job_id, None)  # it may have no answer
        self._worker.start(work)

    def layers_computed(self, step: int, num_layers: int) -> None:
        """See `KvConnectorWorker.layers_computed`."""
        self._worker.layers_computed(step, num_layers)

    def step_ended(self, step: int, *, computed: bool) -> None:
        """See `KvConnectorWorker.step_ended`."""
        self._worker.step_ended(step, computed=computed)

    def poll(self) -> TransferResults:
        """See `KvConnectorWorker.poll`."""
        results = self._worker.poll()
        if results:
            self._count(results)
        return results

    def close(self) -> None:
        """See `KvConnectorWorker.close`."""
        self._worker.close()

    def _count(self, results: TransferResults) -> None:
        now, metrics = self._clock(), self._metrics
        for lookup in results.lookups:
            if lookup.job_id in self._lookups:
                started_at, num_keys = self._lookups.pop(lookup.job_id)
                metrics.looked_up(now - started_at, num_keys, lookup.num_blocks)
        for job_id in results.doubted:
            metrics.job_ended("load", now - self._started_at.pop(("load", job_id)), "unavailable")
        for load in results.loads:
            job = "load", load.job_id
            if job in self._started_at:  # otherwise it was counted when it came into doubt
                metrics.job_ended("load", now - self._started_at.pop(job), load.error)
        for save in results.saves:
            started_at = self._started_at.pop(("save", save.job_id)) + save.waited
            error = "" if save.committed else save.error or "failed"
            metrics.job_ended("save", now - started_at, error)
