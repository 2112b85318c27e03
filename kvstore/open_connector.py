"""From a URL to both halves of a KV connector, or to what it can do without opening it."""

from dataclasses import dataclass

from baton.errors import ConfigurationError
from kvstore.connector_factory import Connector, ConnectorCapabilities, ConnectorFactory
from kvstore.connector_url import FAULTY_PREFIX, MULTI_SCHEME, scheme_of, split_members
from kvstore.faults import FaultyFactory
from kvstore.handoff import connector_name
from kvstore.job_scheduler import JobScheduler
from kvstore.multi.factory import MultiFactory
from kvstore.registry import find_connector, find_store, known_stores, third_party_connectors
from kvstore.store import KvStore
from kvstore.store_worker import StoreConnectorWorker

__all__ = ["connector_capabilities", "open_connector"]

_PEERS = ("grpc", "nixl")


def open_connector(url: str) -> Connector:
    """Opens both halves of the connector that a URL names.

    Raises:
        ConfigurationError: unknown scheme (lists the known ones), a bad option,
            or a missing package.
    """
    return _factory_of(url).open(url)


def connector_capabilities(url: str) -> ConnectorCapabilities:
    """What the connector that a URL names can do.

    Raises:
        ConfigurationError: as `open_connector`, for schemes and packages.
    """
    return _factory_of(url).capabilities


def _factory_of(url: str) -> ConnectorFactory:
    scheme = scheme_of(url)
    if scheme.startswith(FAULTY_PREFIX):
        return FaultyFactory(_factory_of(url[len(FAULTY_PREFIX) :]))
    if scheme == MULTI_SCHEME:
        return MultiFactory(tuple(map(_factory_of_member, split_members(url))))
    if scheme in _PEERS:
        return _PeerFactory()
    if scheme in known_stores():
        return _StoreFactory(find_store(url))
    factory = find_connector(scheme)
    if factory is None:
        raise ConfigurationError(_unknown(scheme))
    return factory


def _factory_of_member(url: str) -> ConnectorFactory:
    if scheme_of(url) == MULTI_SCHEME:
        raise ConfigurationError("multi:// is no member of another; name all members in one")
    return _factory_of(url)


def _unknown(scheme: str) -> str:
    schemes = {*_PEERS, MULTI_SCHEME, *known_stores(), *third_party_connectors()}
    known = ", ".join(f"{name}://" for name in sorted(schemes))
    if not scheme:
        return f"a KV connector's URL begins with one of {known}"
    return f"unknown KV connector scheme {scheme!r}; known are {known}"


@dataclass(frozen=True, slots=True)
class _StoreFactory:
    """A store's connector."""

    store_class: type[KvStore]

    @property
    def capabilities(self) -> ConnectorCapabilities:
        store = self.store_class.capabilities
        return ConnectorCapabilities(
            shared_between_processes=store.shared_between_processes,
            shared_between_hosts=store.shared_between_hosts,
            keeps_leases=store.keeps_leases,
        )

    def open(self, url: str) -> Connector:
        store = self.store_class.from_url(url)
        # Only blocks that need no copy can be saved while their step runs.
        scheduler = JobScheduler(
            connector_name(url),
            lease_s=store.ttl_s,
            saves_ahead=store.capabilities.takes_frames,
        )
        return scheduler, StoreConnectorWorker(store)


class _PeerFactory:
    """Peers, whose packages are imported when one is opened."""

    capabilities = ConnectorCapabilities(
        shared_between_processes=True,
        shared_between_hosts=True,
        finds_by_key=False,
        keeps_leases=True,
        lends_blocks=True,
    )

    def open(self, url: str) -> Connector:
        from kvstore.peer.open import open_peer_connector

        return open_peer_connector(url)
