"""Third parties' stores: one that keeps the contract, and some that break it, each in one way."""

import time

from kvstore.store import KvStore
from kvstore.stores.memory import MemoryStore


class GoodStore(MemoryStore):
    """Keeps the contract."""


class OverwritingStore(MemoryStore):
    """Replaces what exists."""

    def put_many(self, keys, values):
        self.delete(keys)
        super().put_many(keys, values)


class TornStore(MemoryStore):
    """Shows a blank object of the right size while the real one is on its way."""

    def put_many(self, keys, values):
        blanks = [
            memoryview(bytes(value.nbytes // 2) + value[value.nbytes // 2 :]) for value in values
        ]
        absent = [key for key in keys if not self.contains_prefix([key])]
        super().put_many(keys, blanks)
        time.sleep(0.02)
        self.delete(absent)
        super().put_many(keys, values)


class CountingStore(MemoryStore):
    """Counts all keys that exist, and not the prefix."""

    def contains_prefix(self, keys):
        return sum(super(CountingStore, self).contains_prefix([key]) for key in keys)


class ImmortalStore(MemoryStore):
    """Forgets the TTL on reading."""

    def put_many(self, keys, values):
        super().put_many(keys, values)
        self._ever_put = {**getattr(self, "_ever_put", {}), **dict(zip(keys, values, strict=True))}

    def get_many_into(self, keys, buffers):
        for key in keys:
            super().put_many([key], [self._ever_put[key]])
        return super().get_many_into(keys, buffers)


class UntouchedStore(MemoryStore):
    """Does not touch what is read."""

    def get_many_into(self, keys, buffers):
        entries = [self._objects.find(key) for key in keys]
        ages = [entry.touched_s if entry else 0.0 for entry in entries]
        statuses = super().get_many_into(keys, buffers)
        for entry, touched_s in zip(entries, ages, strict=True):
            if entry:
                entry.touched_s = touched_s
        return statuses


class PeekingStore(MemoryStore):
    """Does not touch what is looked up."""

    def contains_prefix(self, keys):
        missing = (i for i, key in enumerate(keys) if self._objects.find(key) is None)
        return next(missing, len(keys))


class RevivingStore(MemoryStore):
    """Brings back what expired when it is looked up."""

    def contains_prefix(self, keys):
        num_alive = super().contains_prefix(keys)
        for key in keys:
            if entry := self._objects.entries.get(key):
                entry.touched_s = time.monotonic()
        return num_alive


class UnboundedStore(MemoryStore):
    """Takes `max_bytes` and does not keep to it."""

    def put_many(self, keys, values):
        self._objects.max_bytes = 1 << 40
        super().put_many(keys, values)


class EvictingStore(MemoryStore):
    """Takes `lease_s` and evicts what is leased."""

    def put_many(self, keys, values):
        self._objects.lease_s = 0.0
        super().put_many(keys, values)


class ForgetfulStore(MemoryStore):
    """Leases what is put, and does not renew it."""

    def contains_prefix(self, keys):
        entries = [self._objects.find(key) for key in keys]
        touches = [entry and entry.touched_s for entry in entries]
        num_alive = super().contains_prefix(keys)
        for entry, touched_s in zip(entries, touches, strict=True):
            if entry:
                entry.touched_s = touched_s
        return num_alive


class HastyStore(MemoryStore):
    """Does not tell the URL's `timeout_s`."""

    @classmethod
    def from_url(cls, url):
        store = super().from_url(url)
        store.timeout_s = KvStore.timeout_s
        return store


class CarelessStore(MemoryStore):
    """Ignores options that it does not know."""

    @classmethod
    def from_url(cls, url):
        known = ("ttl_s", "lease_s", "max_bytes", "timeout_s")
        base, _, query = url.partition("?")
        kept = "&".join(pair for pair in query.split("&") if pair.split("=")[0] in known)
        return super().from_url(f"{base}?{kept}")
