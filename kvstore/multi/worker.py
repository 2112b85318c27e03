"""The worker half over several members, and the factory of `multi://URL,URL,...`."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from baton.common.errors import ConfigurationError
from kvstore.connector import (
    Connector,
    ConnectorCapabilities,
    ConnectorFactory,
    KvConnectorScheduler,
    KvConnectorWorker,
)
from kvstore.guard.metrics import Direction, KvMetrics, TransferMetrics
from kvstore.guard.status import BackendStatus
from kvstore.jobs import ConnectorWork, TransferResults
from kvstore.layout import KvLayout
from kvstore.multi.jobs import MultiResults, MultiWork
from kvstore.multi.scheduler import MultiMember, MultiScheduler
from kvstore.transfer_form import WHOLE, PoolShare, TransferForm
from kvstore.url import split_members

__all__ = ["MultiFactory", "MultiWorker"]


class MultiWorker(KvConnectorWorker):
    """Passes each member its own work and collects its results.

    Args:
        members: in the order of the scheduler half's.
        names: what metrics call the members. The second member of a name gets a number.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        members: Sequence[KvConnectorWorker],
        names: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = tuple(members)
        self._names = _distinct(names)
        self._clock = clock
        self._counts: list[_JobCounts] = []  # per member; empty while nothing is measured

    @override
    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        for member in self._members:
            member.register_pool(pool, layout, form, share)

    @override
    def set_waker(self, wake: Callable[[], None]) -> None:
        for member in self._members:
            member.set_waker(wake)

    @override
    def measure(self, metrics: KvMetrics, backend: str) -> None:
        """Counts each member's calls and jobs under the member's name."""
        for member, name in zip(self._members, self._names, strict=True):
            member.measure(metrics, name)
        self._counts = [_JobCounts(metrics.of(name), self._clock) for name in self._names]

    @override
    def watch(self) -> None:
        for member in self._members:
            member.watch()

    @property
    @override
    def statuses(self) -> Sequence[BackendStatus]:
        return [status for member in self._members for status in member.statuses]

    @override
    def start(self, work: ConnectorWork) -> None:
        assert isinstance(work, MultiWork), "the scheduler half must be a MultiScheduler"
        for counts, share in zip(self._counts, work.members, strict=False):
            counts.start(share)
        for member, share in zip(self._members, work.members, strict=True):
            if share:
                member.start(share)

    @override
    def poll(self) -> MultiResults:
        members = tuple(member.poll() for member in self._members)
        for counts, results in zip(self._counts, members, strict=False):
            counts.end(results)
        return MultiResults(members=members)

    @override
    def close(self) -> None:
        """Closes all members, even if one of them fails to close."""
        with ExitStack() as members:
            for member in reversed(self._members):
                members.enter_context(closing(member))


class _JobCounts:
    """Counts the jobs of one member, from their start to their result.

    Args:
        metrics: where to count.
        clock: monotonic seconds.
    """

    def __init__(self, metrics: TransferMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lookups: dict[int, tuple[float, int]] = {}  # started at, number of keys
        self._started_at: dict[tuple[Direction, int], float] = {}

    def start(self, work: ConnectorWork) -> None:
        """Notes when the jobs of `work` start."""
        now = self._clock()
        self._lookups.update((job.job_id, (now, len(job.keys))) for job in work.lookups)
        self._started_at.update((("load", job.job_id), now) for job in work.loads)
        self._started_at.update((("save", job.job_id), now) for job in work.saves)
        for job_id in work.cancelled_lookups:
            self._lookups.pop(job_id, None)  # its answer may never come

    def end(self, results: TransferResults) -> None:
        """Counts the jobs that have ended."""
        now, metrics = self._clock(), self._metrics
        for lookup in results.lookups:
            if lookup.job_id in self._lookups:
                started_at, num_keys = self._lookups.pop(lookup.job_id)
                metrics.looked_up(now - started_at, num_keys, lookup.num_blocks)
        for job_id in results.doubted:
            metrics.job_ended("load", now - self._started_at.pop(("load", job_id)), "unavailable")
        for load in results.loads:
            job = "load", load.job_id
            if job in self._started_at:  # otherwise it was counted as doubted
                metrics.job_ended("load", now - self._started_at.pop(job), load.error)
        for save in results.saves:
            started_at = self._started_at.pop(("save", save.job_id))
            error = "" if save.committed else save.error or "failed"
            metrics.job_ended("save", now - started_at, error)


def _distinct(names: Sequence[str]) -> list[str]:
    counts = Counter[str]()
    distinct = []
    for name in names:
        counts[name] += 1
        distinct.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return distinct


@dataclass(frozen=True, slots=True)
class MultiFactory:
    """Opens a connector over several members.

    Attributes:
        members: one factory per member, in the URL's order.
    """

    members: tuple[ConnectorFactory, ...]

    def __post_init__(self) -> None:
        if len(self.members) <= 1:
            raise ConfigurationError("multi:// takes two connectors or more: multi://URL,URL,...")

    @property
    def capabilities(self) -> ConnectorCapabilities:
        """Everything that at least one member can do."""
        names = ConnectorCapabilities.__slots__
        members = [member.capabilities for member in self.members]
        able = {name: any(getattr(of_member, name) for of_member in members) for name in names}
        return ConnectorCapabilities(**able)

    def open(self, url: str) -> Connector:
        """Opens all members, or none.

        Raises:
            ConfigurationError: the URL of a member is wrong; names the option.
        """
        with ExitStack() as on_failure:
            halves = []
            for member, member_url in zip(self.members, split_members(url), strict=True):
                halves.append(member.open(member_url))
                on_failure.enter_context(closing(halves[-1][1]))
            on_failure.pop_all()
        schedulers, workers = zip(*halves, strict=True)
        names = [scheduler.scheme for scheduler in schedulers]
        return MultiScheduler(self._with_roles(schedulers)), MultiWorker(workers, names)

    def _with_roles(self, schedulers: Sequence[KvConnectorScheduler]) -> list[MultiMember]:
        """Members that processes do not share carry handoffs only if processes share none."""
        are_shared = [member.capabilities.shared_between_processes for member in self.members]
        return [
            MultiMember(scheduler, carries_handoffs=is_shared or not any(are_shared))
            for scheduler, is_shared in zip(schedulers, are_shared, strict=True)
        ]
