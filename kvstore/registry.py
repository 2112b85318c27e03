"""From a store's URL to the store: `open_store`, and `store_capabilities` without opening it.

Baton's own stores are in a table here. Third parties name theirs in their
package's metadata, without a line here:

    [project.entry-points."baton.kv_stores"]
    myscheme = "my_package.my_module:MyStore"
"""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from baton.errors import ConfigurationError
from kvstore.store import KvStore, StoreCapabilities

__all__ = ["ENTRY_POINT_GROUP", "open_store", "store_capabilities"]

ENTRY_POINT_GROUP = "baton.kv_stores"

_BUILT_IN = {
    "memory": "kvstore.stores.memory:MemoryStore",
    "shm": "kvstore.stores.directory:ShmStore",
    "file": "kvstore.stores.directory:FileStore",
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
    return _load_class(url).from_url(url)


def store_capabilities(url: str) -> StoreCapabilities:
    """What the store that a URL names can do.

    Raises:
        ConfigurationError: the scheme is unknown or its package cannot be imported.
    """
    return _load_class(url).capabilities


def _known_schemes() -> str:
    third_party = (point.name for point in entry_points(group=ENTRY_POINT_GROUP))
    return ", ".join(f"{name}://" for name in sorted({*_BUILT_IN, *third_party}))


def _load_class(url: str) -> type[KvStore]:
    """The class of a URL's scheme. Baton's own cannot be replaced."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigurationError(f"a KV store's URL begins with one of {_known_schemes()}")
    scheme = scheme.lower()
    if scheme in _BUILT_IN:
        module_name, class_name = _BUILT_IN[scheme].split(":")
        store_class: type[KvStore] = getattr(import_module(module_name), class_name)
        return store_class
    points = tuple(entry_points(group=ENTRY_POINT_GROUP, name=scheme))
    if not points:
        message = f"unknown KV store scheme {scheme!r}; known are {_known_schemes()}"
        raise ConfigurationError(message)
    return _load_third_party(points[0])


def _load_third_party(point: EntryPoint) -> type[KvStore]:
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        message = f"KV store {point.name}:// cannot be imported from {point.value}: {error}"
        raise ConfigurationError(message) from error
    if not (isinstance(loaded, type) and issubclass(loaded, KvStore)):
        raise ConfigurationError(f"KV store {point.name}://: {point.value} is no KvStore class")
    return loaded
