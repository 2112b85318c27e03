"""Third parties' stores: one keeps the contract, each other one breaks one rule."""

import time

from kvstore.store import KvObject, KvStore
from kvstore.stores.memory import MemoryStore


class GoodStore(MemoryStore):
    """Keeps the contract."""


class OverwritingStore(MemoryStore):
    """Replaces existing objects."""

    def put(self, keys, objects):
        self.delete(keys)
        super().put(keys, objects)


class TornStore(MemoryStore):
    """Exposes a blank object of the right size before the real one is written."""

    def put(self, keys, objects):
        blanks = [
            KvObject(value.header, memoryview(bytes(len(value.payload)))) for value in objects
        ]
        absent = [key for key in keys if not self.contains_prefix([key])]
        super().put(keys, blanks)
        time.sleep(0.02)
        self.delete(absent)
        super().put(keys, objects)


class CountingStore(MemoryStore):
    """Counts all existing keys instead of the prefix."""

    def contains_prefix(self, keys):
        return sum(super(CountingStore, self).contains_prefix([key]) for key in keys)


class ImmortalStore(MemoryStore):
    """Ignores the TTL in reads."""

    def put(self, keys, objects):
        super().put(keys, objects)
        self._ever_put = {**getattr(self, "_ever_put", {}), **dict(zip(keys, objects, strict=True))}

    def get_into(self, keys, objects):
        for key in keys:
            super().put([key], [self._ever_put[key]])
        return super().get_into(keys, objects)


class UntouchedStore(MemoryStore):
    """Does not renew the lease and TTL of an object that is read."""

    def get_into(self, keys, objects):
        entries = [self._objects.find(key) for key in keys]
        ages = [entry.touched_s if entry else 0.0 for entry in entries]
        statuses = super().get_into(keys, objects)
        for entry, touched_s in zip(entries, ages, strict=True):
            if entry:
                entry.touched_s = touched_s
        return statuses


class PeekingStore(MemoryStore):
    """Does not renew the lease and TTL of an object that is looked up."""

    def contains_prefix(self, keys):
        missing = (i for i, key in enumerate(keys) if self._objects.find(key) is None)
        return next(missing, len(keys))


class RevivingStore(MemoryStore):
    """A look-up brings back expired objects."""

    def contains_prefix(self, keys):
        num_alive = super().contains_prefix(keys)
        for key in keys:
            if entry := self._objects.entries.get(key):
                entry.touched_s = time.monotonic()
        return num_alive


class UnboundedStore(MemoryStore):
    """Accepts `max_bytes` and exceeds it."""

    def put(self, keys, objects):
        self._objects.max_bytes = 1 << 40
        super().put(keys, objects)


class SweepingStore(MemoryStore):
    """Evicts what is there when it is opened."""

    @classmethod
    def from_url(cls, url):
        store = super().from_url(url)
        store.delete(list(store._objects.entries))
        return store


class EvictingStore(MemoryStore):
    """Accepts `lease_s` and evicts leased objects."""

    def put(self, keys, objects):
        self._objects.lease_s = 0.0
        super().put(keys, objects)


class ForgetfulStore(MemoryStore):
    """Leases an object that is put, and a look-up does not renew the lease."""

    def contains_prefix(self, keys):
        entries = [self._objects.find(key) for key in keys]
        touches = [entry and entry.touched_s for entry in entries]
        num_alive = super().contains_prefix(keys)
        for entry, touched_s in zip(entries, touches, strict=True):
            if entry:
                entry.touched_s = touched_s
        return num_alive


class HastyStore(MemoryStore):
    """Does not report the URL's `timeout_s`."""

    @classmethod
    def from_url(cls, url):
        store = super().from_url(url)
        store.timeout_s = KvStore.timeout_s
        return store


class CarelessStore(MemoryStore):
    """Ignores unknown options."""

    @classmethod
    def from_url(cls, url):
        known = ("ttl_s", "lease_s", "max_bytes", "timeout_s")
        base, _, query = url.partition("?")
        kept = "&".join(pair for pair in query.split("&") if pair.split("=")[0] in known)
        return super().from_url(f"{base}?{kept}")
