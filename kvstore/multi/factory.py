"""Opens `multi://URL,URL,...`: several connectors as one."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from baton.errors import ConfigurationError
from kvstore.connector import KvConnectorScheduler
from kvstore.connector_factory import Connector, ConnectorCapabilities, ConnectorFactory
from kvstore.connector_url import split_members
from kvstore.multi.scheduler import MultiMember, MultiScheduler
from kvstore.multi.worker import MultiWorker

__all__ = ["MultiFactory"]


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
