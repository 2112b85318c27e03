"""`memory://NAME`: objects in this process; the least recently used are evicted first.

All stores of one process that are open under one name share their objects, so
that a prefill and a decode engine in one process can hand over. The objects
are dropped when the last of these stores is closed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Self

from typing_extensions import override

from kvstore.store import (
    GetStatus,
    KvObject,
    KvStore,
    StoreCapabilities,
    StoreFullError,
    StoreStats,
    StoreUnavailableError,
)
from kvstore.stores.base import StoreCounters, copy_into
from kvstore.url import LIMIT_OPTIONS, StoreUrl, bound_in_memory

__all__ = ["MemoryStore"]

_DEFAULT_MAX_BYTES = 1 << 30


@dataclass(slots=True)
class _StoredObject:
    value: bytes
    touched_s: float


@dataclass(slots=True)
class _Objects:
    """The objects of one name, the least recently touched first.

    All objects have one TTL and one lease, so both end in this order. Every method is called
    with `lock` held. Removals are counted with the caller's counters.
    """

    ttl_s: float
    lease_s: float
    max_bytes: int
    lock: Lock = field(default_factory=Lock)
    entries: OrderedDict[bytes, _StoredObject] = field(default_factory=OrderedDict)
    num_bytes: int = 0
    num_users: int = 0

    def find(self, key: bytes) -> _StoredObject | None:
        entry = self.entries.get(key)
        return None if entry is None or self._is_expired(entry) else entry

    def touch(self, key: bytes) -> bytes | None:
        """Returns the value of an object and makes it the youngest; None if it is absent."""
        entry = self.find(key)
        if entry is None:
            return None
        entry.touched_s = monotonic()
        self.entries.move_to_end(key)
        return entry.value

    def insert(self, key: bytes, value: bytes, counters: StoreCounters) -> None:
        """Adds an absent object, after removing expired and evicted ones.

        Raises:
            StoreFullError: leased objects leave too little room; none was evicted.
        """
        self.remove_expired(counters)
        evicted_keys = self._choose_evicted(len(value))
        for evicted_key in evicted_keys:
            self.remove(evicted_key, counters)
        counters.count_removals(evictions=len(evicted_keys))
        self.entries[key] = _StoredObject(value, monotonic())
        self.num_bytes += len(value)

    def _choose_evicted(self, num_bytes: int) -> list[bytes]:
        """Returns the oldest objects that must be evicted for `num_bytes` more to fit."""
        chosen = []
        excess_bytes = self.num_bytes + num_bytes - self.max_bytes
        oldest = iter(self.entries.items())
        while excess_bytes > 0:
            key, entry = next(oldest)
            if self._age_s(entry) < self.lease_s:
                raise StoreFullError(
                    f"no room for {num_bytes} bytes: the store is full of leased objects"
                )
            chosen.append(key)
            excess_bytes -= len(entry.value)
        return chosen

    def remove(self, key: bytes, counters: StoreCounters) -> bool:
        """Removes an object; returns whether it was there and had not expired."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return False
        self.num_bytes -= len(entry.value)
        is_expired = self._is_expired(entry)
        counters.count_removals(expirations=is_expired)
        return not is_expired

    def remove_expired(self, counters: StoreCounters) -> None:
        """Removes all expired objects."""
        while self.entries:
            key, entry = next(iter(self.entries.items()))
            if not self._is_expired(entry):
                return
            self.remove(key, counters)

    def oldest_age_s(self) -> float | None:
        """Returns the seconds since the first object was touched; None if the store is empty."""
        return next((self._age_s(entry) for entry in self.entries.values()), None)

    def _is_expired(self, entry: _StoredObject) -> bool:
        return self._age_s(entry) > self.ttl_s

    def _age_s(self, entry: _StoredObject) -> float:
        return monotonic() - entry.touched_s


_registry: dict[str, _Objects] = {}
_registry_lock = Lock()


class MemoryStore(KvStore):
    """One user of the objects of a name; made by `from_url`."""

    capabilities = StoreCapabilities(
        shared_between_processes=False,
        shared_between_hosts=False,
        survives_restart=False,
        takes_max_bytes=True,
        keeps_leases=True,
    )

    def __init__(self, name: str, objects: _Objects, timeout_s: float) -> None:
        self.ttl_s = objects.ttl_s
        self.lease_s = objects.lease_s
        self.timeout_s = timeout_s
        self._name = name
        self._objects = objects
        self._counters = StoreCounters(sees_removals=True)
        self._is_closed = False

    @classmethod
    @override
    def from_url(cls, url: str) -> Self:
        """Opens `memory://NAME?ttl_s=&lease_s=&max_bytes=&timeout_s=`.

        No call waits, so `timeout_s` is only checked.

        Raises:
            ConfigurationError: a bad option, or a path; the name is open in
                this process with other options.
        """
        parts = StoreUrl.parse(url, LIMIT_OPTIONS)
        if parts.path.strip("/"):
            raise parts.error("a path has no meaning; write memory://NAME")
        limits = parts.limits(_DEFAULT_MAX_BYTES)
        ttl_s, lease_s = limits.ttl_s, limits.lease_s
        max_bytes = cls.memory_bytes(url)
        with _registry_lock:
            objects = _registry.setdefault(parts.authority, _Objects(ttl_s, lease_s, max_bytes))
            if (objects.ttl_s, objects.lease_s, objects.max_bytes) != (ttl_s, lease_s, max_bytes):
                raise parts.error(
                    "it is open in this process with other options: ttl_s="
                    f"{objects.ttl_s:g}, lease_s={objects.lease_s:g}, max_bytes={objects.max_bytes}"
                )
            objects.num_users += 1
        return cls(parts.authority, objects, limits.timeout_s)

    @classmethod
    @override
    def memory_bytes(cls, url: str) -> int:
        max_bytes = StoreUrl.parse(url, LIMIT_OPTIONS).num_bytes("max_bytes")
        return max_bytes or bound_in_memory(_DEFAULT_MAX_BYTES)

    @override
    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        for key, new in zip(keys, objects, strict=True):
            self._put_one(key, new)
        self._counters.count_puts(objects)

    def _put_one(self, key: bytes, new: KvObject) -> None:
        objects, num_bytes = self._objects, new.nbytes
        if num_bytes > objects.max_bytes:
            raise StoreUnavailableError(
                f"an object of {num_bytes} bytes exceeds max_bytes={objects.max_bytes}"
            )
        with objects.lock:
            if objects.touch(key) is not None:
                return
        copy = new.to_bytes()  # without the lock, because it takes longest
        with objects.lock:
            if objects.touch(key) is None:
                objects.insert(key, copy, self._counters)

    @override
    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        with self._objects.lock:
            values = [self._objects.touch(key) for key in keys]
        statuses = [copy_into(*pair) for pair in zip(values, objects, strict=True)]
        self._counters.count_gets(statuses, objects)
        return statuses

    @override
    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        with self._objects.lock:
            missing = (i for i, key in enumerate(keys) if self._objects.touch(key) is None)
            return next(missing, len(keys))

    @override
    def delete(self, keys: Sequence[bytes]) -> int:
        with self._objects.lock:
            return sum(self._objects.remove(key, self._counters) for key in keys)

    @override
    def stats(self) -> StoreStats:
        objects = self._objects
        with objects.lock:
            objects.remove_expired(self._counters)
            return self._counters.snapshot(
                num_objects=len(objects.entries),
                num_bytes=objects.num_bytes,
                oldest_age_s=objects.oldest_age_s(),
            )

    @override
    def close(self) -> None:
        """Leaves the name; its objects are dropped with the last user."""
        with _registry_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._objects.num_users -= 1
            if self._objects.num_users == 0:
                del _registry[self._name]
