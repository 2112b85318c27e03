"""From a URL's scheme to the store or the connector that it names.

Baton's own are in tables: stores here, the others in `kvstore.open_connector`.
Third parties name theirs in their package's metadata, without a line here:

    [project.entry-points."baton.kv_stores"]
    myscheme = "my_package.my_module:MyStore"

    [project.entry-points."baton.kv_connectors"]
    otherscheme = "my_package.other_module:MyConnector"
"""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from baton.errors import ConfigurationError
from kvstore.connector_factory import ConnectorCapabilities, ConnectorFactory
from kvstore.connector_url import scheme_of
from kvstore.store import KvStore, StoreCapabilities

__all__ = [
    "find_connector",
    "find_store",
    "known_stores",
    "open_store",
    "store_capabilities",
    "third_party_connectors",
]

_STORE_GROUP = "baton.kv_stores"
_CONNECTOR_GROUP = "baton.kv_connectors"

_STORES = {
    "memory": "kvstore.stores.memory:MemoryStore",
    "shm": "kvstore.stores.shm.store:ShmStore",
    "file": "kvstore.stores.file:FileStore",
    "redis": "kvstore.stores.redis:RedisStore",
    "redis+sentinel": "kvstore.stores.redis:RedisStore",
    "redis+cluster": "kvstore.stores.redis:RedisStore",
    "rediss": "kvstore.stores.redis:RedisStore",
    "rediss+sentinel": "kvstore.stores.redis:RedisStore",
    "rediss+cluster": "kvstore.stores.redis:RedisStore",
}


def open_store(url: str) -> KvStore:
    """Opens the store that a URL names.

    Raises:
        ConfigurationError: the scheme is unknown (lists the known ones), its
            package cannot be imported, or the store refuses the URL.
    """
    return find_store(url).from_url(url)


def store_capabilities(url: str) -> StoreCapabilities:
    """What the store that a URL names can do.

    Raises:
        ConfigurationError: the scheme is unknown or its package cannot be imported.
    """
    return find_store(url).capabilities


def find_store(url: str) -> type[KvStore]:
    """The class of the store that a URL names.

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


def find_connector(scheme: str) -> ConnectorFactory | None:
    """What opens a third party's connector; None if nobody has installed one of that scheme.

    Raises:
        ConfigurationError: it cannot be imported, or is not what it should be.
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


def known_stores() -> set[str]:
    """The schemes of all stores. Baton's own cannot be replaced."""
    return {*_STORES, *(point.name for point in entry_points(group=_STORE_GROUP))}


def third_party_connectors() -> set[str]:
    """The schemes that `find_connector` finds."""
    return {point.name for point in entry_points(group=_CONNECTOR_GROUP)}


def _unknown_store(scheme: str) -> str:
    known = ", ".join(f"{name}://" for name in sorted(known_stores()))
    if not scheme:
        return f"a KV store's URL begins with one of {known}"
    return f"unknown KV store scheme {scheme!r}; known are {known}"


def _find_point(group: str, scheme: str) -> EntryPoint | None:
    return next(iter(entry_points(group=group, name=scheme)), None)


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        message = f"{point.name}:// cannot be imported from {point.value}: {error}"
        raise ConfigurationError(message) from error
