"""Opens KV stores and connectors by URL.

The URL's scheme selects Baton's own ones from tables. Installed packages add stores and connectors
in their metadata, without a change here:

    [project.entry-points."baton.kv_stores"]
    myscheme = "my_package.my_module:MyStore"

    [project.entry-points."baton.kv_connectors"]
    otherscheme = "my_package.other_module:MyConnector"
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from baton.common.errors import ConfigurationError
from kvstore.connector import Connector, ConnectorCapabilities, ConnectorFactory
from kvstore.faults import FaultyFactory, take_fault_options
from kvstore.multi.worker import MultiFactory
from kvstore.store import KvStore, StoreCapabilities
from kvstore.store_connector import StoreFactory
from kvstore.url import FAULTY_PREFIX, MULTI_SCHEME, scheme_of, split_members

if TYPE_CHECKING:
    from baton.common.security.cluster import ClusterSecurity

__all__ = [
    "PEERS",
    "connector_capabilities",
    "has_fixed_host",
    "has_fixed_port",
    "known_stores",
    "memory_bytes",
    "open_connector",
    "open_store",
    "store_capabilities",
]

_STORE_GROUP = "baton.kv_stores"
_CONNECTOR_GROUP = "baton.kv_connectors"

_STORES = {
    "memory": "kvstore.stores.memory:MemoryStore",
    "shm": "kvstore.stores.shm.store:ShmStore",
    "file": "kvstore.stores.file.store:FileStore",
    "redis": "kvstore.stores.redis.store:RedisStore",
    "redis+sentinel": "kvstore.stores.redis.store:RedisStore",
    "redis+cluster": "kvstore.stores.redis.store:RedisStore",
    "rediss": "kvstore.stores.redis.store:RedisStore",
    "rediss+sentinel": "kvstore.stores.redis.store:RedisStore",
    "rediss+cluster": "kvstore.stores.redis.store:RedisStore",
}

PEERS = frozenset({"grpc", "nixl"})
"""The schemes of connectors whose processes lend each other their blocks."""
_ALL_INTERFACES = ("0.0.0.0", "::")


def open_store(url: str, *, is_diagnosis: bool = False) -> KvStore:
    """Opens the store of a URL.

    Args:
        url: the store's.
        is_diagnosis: whether it is opened by `KvStore.open_for_diagnosis`.

    Raises:
        ConfigurationError: the scheme is unknown (lists the known ones), its
            package cannot be imported, or the store refuses the URL.
    """
    store_class = _find_store(url)
    return store_class.open_for_diagnosis(url) if is_diagnosis else store_class.from_url(url)


def store_capabilities(url: str) -> StoreCapabilities:
    """Returns the capabilities of the store of a URL.

    Raises:
        ConfigurationError: the scheme is unknown or its package cannot be imported.
    """
    return _find_store(url).capabilities


def memory_bytes(url: str) -> int:
    """Returns how much of this machine's memory the objects of a connector's stores may take. What
    peers lend is in their KV cache.

    Raises:
        ConfigurationError: the URL is malformed, or a package cannot be imported.
    """
    scheme = scheme_of(url)
    if scheme.startswith(FAULTY_PREFIX):
        return memory_bytes(take_fault_options(url)[1])
    if scheme == MULTI_SCHEME:
        return sum(map(memory_bytes, split_members(url)))
    return _find_store(url).memory_bytes(url) if scheme in known_stores() else 0


def _find_store(url: str) -> type[KvStore]:
    """Returns the class of the store of a URL.

    Raises:
        ConfigurationError: the scheme is unknown or its package cannot be imported.
    """
    scheme = scheme_of(url)
    if scheme in _STORES:
        module_name, class_name = _STORES[scheme].split(":")
        store_class: type[KvStore] = getattr(import_module(module_name), class_name)
        return store_class
    point = _find_point(_STORE_GROUP, scheme)
    if point is None:
        raise ConfigurationError(_unknown_store(scheme))
    loaded = _load(point)
    if not (isinstance(loaded, type) and issubclass(loaded, KvStore)):
        raise ConfigurationError(f"KV store {point.name}://: {point.value} is no KvStore class")
    return loaded


def has_fixed_port(url: str) -> bool:
    """Returns whether the connector of a URL listens on a port that the URL names."""
    return any(port for _, port, _ in _peers_in(url))


def has_fixed_host(url: str) -> bool:
    """Returns whether the connector of a URL is reached at an address that the URL names, which
    one machine has. Without a host, peers listen on this machine only.
    """
    return any(
        host not in _ALL_INTERFACES or "advertise" in options for host, _, options in _peers_in(url)
    )


def _peers_in(url: str) -> Iterator[tuple[str | None, int | None, Collection[str]]]:
    """Yields host, port and options of each peer connector in a URL, unless that is malformed."""
    scheme = scheme_of(url)
    if scheme.startswith(FAULTY_PREFIX):
        yield from _peers_in(url[len(FAULTY_PREFIX) :])
    elif scheme == MULTI_SCHEME:
        for member in split_members(url):
            yield from _peers_in(member)
    elif scheme in PEERS:
        with suppress(ValueError):
            parts = urlsplit(url)
            yield parts.hostname, parts.port, parse_qs(parts.query)


def known_stores() -> set[str]:
    """Returns the schemes of all stores. Packages cannot replace Baton's own."""
    return {*_STORES, *(point.name for point in entry_points(group=_STORE_GROUP))}


def open_connector(
    url: str,
    security: "ClusterSecurity | None" = None,
    rank: int = 0,
    *,
    is_diagnosis: bool = False,
) -> Connector:
    """Opens both halves of the connector of a URL.

    Args:
        url: the connector's.
        security: for calls to other processes; stores have credentials in their URLs.
        rank: number of this process among the ranks of its engine, which all have the same URL.
        is_diagnosis: whether stores are opened by `KvStore.open_for_diagnosis`.

    Raises:
        ConfigurationError: unknown scheme (lists the known ones), a bad option,
            or a missing package.
    """
    return _factory_of(url, security, rank, is_diagnosis=is_diagnosis).open(url)


def connector_capabilities(url: str) -> ConnectorCapabilities:
    """Returns the capabilities of the connector of a URL. Does not open it.

    Raises:
        ConfigurationError: the scheme is unknown, or a package is missing.
    """
    return _factory_of(url).capabilities


def _factory_of(
    url: str,
    security: "ClusterSecurity | None" = None,
    rank: int = 0,
    *,
    is_diagnosis: bool = False,
) -> ConnectorFactory:
    def factory_of_part(part: str) -> ConnectorFactory:
        return _factory_of(part, security, rank, is_diagnosis=is_diagnosis)

    scheme = scheme_of(url)
    if scheme.startswith(FAULTY_PREFIX):
        return FaultyFactory(factory_of_part(url[len(FAULTY_PREFIX) :]))
    if scheme == MULTI_SCHEME:
        members = split_members(url)
        if MULTI_SCHEME in map(scheme_of, members):
            raise ConfigurationError("multi:// is no member of another; name all members in one")
        return MultiFactory(tuple(map(factory_of_part, members)))
    if scheme in PEERS:
        return _PeerFactory(security, rank)
    if scheme in known_stores():
        return StoreFactory(_find_store(url), is_diagnosis)
    factory = _find_connector(scheme)
    if factory is None:
        raise ConfigurationError(_unknown_connector(scheme))
    return factory


def _find_connector(scheme: str) -> ConnectorFactory | None:
    """Returns the factory of an installed package's connector; None if no package has the scheme.

    Raises:
        ConfigurationError: it cannot be imported, or is no `ConnectorFactory`.
    """
    point = _find_point(_CONNECTOR_GROUP, scheme)
    if point is None:
        return None
    loaded = _load(point)
    capabilities = getattr(loaded, "capabilities", None)
    if not isinstance(loaded, ConnectorFactory) or not isinstance(
        capabilities, ConnectorCapabilities
    ):
        raise ConfigurationError(
            f"KV connector {point.name}://: {point.value} needs `capabilities` and `open`"
        )
    return loaded


def _unknown_store(scheme: str) -> str:
    known = ", ".join(f"{name}://" for name in sorted(known_stores()))
    if not scheme:
        return f"a KV store's URL begins with one of {known}"
    return f"unknown KV store scheme {scheme!r}; known are {known}"


def _unknown_connector(scheme: str) -> str:
    installed = (point.name for point in entry_points(group=_CONNECTOR_GROUP))
    schemes = {*PEERS, MULTI_SCHEME, *known_stores(), *installed}
    known = ", ".join(f"{name}://" for name in sorted(schemes))
    if not scheme:
        return f"a KV connector's URL begins with one of {known}"
    return f"unknown KV connector scheme {scheme!r}; known are {known}"


def _find_point(group: str, scheme: str) -> EntryPoint | None:
    return next(iter(entry_points(group=group, name=scheme)), None)


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        message = f"{point.name}:// cannot be imported from {point.value}: {error}"
        raise ConfigurationError(message) from error


class _PeerFactory:
    """Opens peers. Imports their packages only then.

    Args:
        security: for calls between peers; None for calls without credentials.
        rank: number of this process among the ranks of its engine.
    """

    capabilities = ConnectorCapabilities(
        shared_between_processes=True,
        shared_between_hosts=True,
        finds_by_key=False,
        keeps_leases=True,
        lends_blocks=True,
    )

    def __init__(self, security: "ClusterSecurity | None", rank: int) -> None:
        self._security, self._rank = security, rank

    def open(self, url: str) -> Connector:
        from kvstore.peer.worker import open_peer_connector

        return open_peer_connector(url, self._security, self._rank)
