"""The worker half over several members: each gets its own work and reports its own results.

Opens `multi://URL,URL,...`: several connectors as one.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigurationError
from kvstore.connector import (
    Connector,
    ConnectorCapabilities,
    ConnectorFactory,
    ConnectorWork,
    KvConnectorScheduler,
    KvConnectorWorker,
)
from kvstore.layout import KvLayout
from kvstore.measured import MeasuredWorker
from kvstore.metrics import KvMetrics
from kvstore.multi.jobs import MultiResults, MultiWork
from kvstore.multi.scheduler import MultiMember, MultiScheduler
from kvstore.transfer_form import WHOLE, HeadShare, TransferForm
from kvstore.url import split_members

__all__ = ["MultiFactory", "MultiWorker"]


class MultiWorker(KvConnectorWorker):
    """Hands work to members. What a member makes wait for makes only its own jobs wait.

    Args:
        members: in the order of the scheduler half's.
        names: what to call them in metrics; the second of a name gets a number.
    """

    def __init__(self, members: Sequence[KvConnectorWorker], names: Sequence[str]) -> None:
        self._members = tuple(members)
        self._names = _distinct(names)

    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: HeadShare = WHOLE,
    ) -> None:
        """See `KvConnectorWorker.register_pool`."""
        for member in self._members:
            member.register_pool(pool, layout, form, share)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `KvConnectorWorker.set_waker`."""
        for member in self._members:
            member.set_waker(wake)

    def measure(self, metrics: KvMetrics, backend: str) -> None:
        """See `KvConnectorWorker.measure`. The jobs of members are not the engine's: they are
        counted here.
        """
        for member, name in zip(self._members, self._names, strict=True):
            member.measure(metrics, name)
        self._members = tuple(
            MeasuredWorker(member, metrics.of(name))
            for member, name in zip(self._members, self._names, strict=True)
        )

    def start(self, work: ConnectorWork) -> None:
        """See `KvConnectorWorker.start`."""
        assert isinstance(work, MultiWork), "the halves belong together"
        for member, share in zip(self._members, work.members, strict=True):
            if share:
                member.start(share)

    def poll(self) -> MultiResults:
        """See `KvConnectorWorker.poll`."""
        return MultiResults(members=tuple(member.poll() for member in self._members))

    def close(self) -> None:
        """See `KvConnectorWorker.close`. One that fails to close keeps no other open."""
        with ExitStack() as members:
            for member in reversed(self._members):
                members.enter_context(closing(member))


def _distinct(names: Sequence[str]) -> list[str]:
    counts = Counter[str]()
    distinct = []
    for name in names:
        counts[name] += 1
        distinct.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return distinct


@dataclass(frozen=True, slots=True)
class MultiFactory:
    """See `ConnectorFactory`. One factory per member, in the URL's order."""

    members: tuple[ConnectorFactory, ...]

    def __post_init__(self) -> None:
        if len(self.members) <= 1:
            raise ConfigurationError("multi:// takes two connectors or more: multi://URL,URL,...")

    @property
    def capabilities(self) -> ConnectorCapabilities:
        """What at least one of the members can do."""
        names = ConnectorCapabilities.__slots__
        members = [member.capabilities for member in self.members]
        able = {name: any(getattr(each, name) for each in members) for name in names}
        return ConnectorCapabilities(**able)

    def open(self, url: str) -> Connector:
        """See `ConnectorFactory`."""
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
        """Where processes share any member, those that they do not share carry no handoffs."""
        are_shared = [member.capabilities.shared_between_processes for member in self.members]
        return [
            MultiMember(scheduler, carries_handoffs=is_shared or not any(are_shared))
            for scheduler, is_shared in zip(schedulers, are_shared, strict=True)
        ]
