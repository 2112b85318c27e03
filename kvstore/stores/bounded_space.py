"""`BoundedSpace`: the bound of a store that processes share, and what is removed to keep it."""

import shutil
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kvstore.store import StoreFullError
from kvstore.stores.base import StoreCounters
from kvstore.url import StoreLimits

__all__ = ["BoundedSpace"]


class _Touched(Protocol):
    """An object as a listing found it."""

    @property
    def touched_ns(self) -> int:
        """When it was last touched, by the space's clock."""


_Listed = TypeVar("_Listed", bound=_Touched)


class BoundedSpace(ABC, Generic[_Listed]):
    """One process's access to a bounded space. All calls need the store's lock.

    A listing yields the oldest objects. It is used until all objects in it are gone, because
    objects that were made or touched after it are younger.

    Args:
        folder: the store's.
        limits: the URL's.
        own_bytes: what the store already takes of the file system.

    Attributes:
        counters: count removals.
        max_bytes: bound of all objects together: the URL's, or else half of what the file system
            has left for the store, up to the store's default.
        oldest_age_s: seconds since the oldest object was touched, as of the last listing or
            eviction; None if no old object was known.
    """

    def __init__(self, folder: Path, limits: StoreLimits, own_bytes: int) -> None:
        self.counters = StoreCounters(sees_removals=True)
        self.max_bytes = limits.max_bytes or _half_of_free(folder, limits, own_bytes)
        self.oldest_age_s: float | None = None
        self._ttl_ns, self._lease_ns = int(limits.ttl_s * 1e9), int(limits.lease_s * 1e9)
        self._by_age: deque[_Listed] = deque()

    def make_room(self, num_bytes: int) -> None:
        """Evicts objects until `num_bytes` more fit the bound.

        Raises:
            StoreFullError: leased objects leave too little room; none was evicted.
        """
        while (excess_bytes := self._object_bytes() + num_bytes - self.max_bytes) > 0:
            chosen = self._choose_evicted(excess_bytes)
            if chosen is None:
                self.list_objects()
                excess_bytes = self._object_bytes() + num_bytes - self.max_bytes
                chosen = self._choose_evicted(excess_bytes)
            if chosen is None:
                raise StoreFullError(
                    f"no room for {num_bytes} bytes: the store is full of leased objects"
                )
            for listed in chosen:
                self._evict(listed)
            self._note_oldest_age()

    def list_objects(self) -> None:
        """Lists the objects by age, and removes expired ones."""
        self._by_age = deque(self._find_objects())
        first_alive_ns = self._now_ns() - self._ttl_ns
        while self._by_age and self._by_age[0].touched_ns < first_alive_ns:
            self._expire(self._by_age.popleft())
        self._note_oldest_age()

    @abstractmethod
    def _now_ns(self) -> int:
        """Returns the time by the clock that touches are recorded with."""

    @abstractmethod
    def _object_bytes(self) -> int:
        """Returns the bytes of all objects, including those being written."""

    @abstractmethod
    def _find_objects(self) -> Iterable[_Listed]:
        """Returns all objects, the least recently touched first; removes dead writers' files."""

    @abstractmethod
    def _bytes_if_untouched(self, listed: _Listed) -> int | None:
        """Returns an object's size; None if it was removed or touched since it was listed."""

    @abstractmethod
    def _evict(self, listed: _Listed) -> None:
        """Removes an object to make room, and counts it."""

    @abstractmethod
    def _expire(self, listed: _Listed) -> None:
        """Removes an object whose TTL is over, and counts it."""

    def _choose_evicted(self, excess_bytes: int) -> list[_Listed] | None:
        """Returns the oldest listed objects that have so many bytes together; None if the listed
        objects without a lease have fewer.
        """
        chosen: list[_Listed] = []
        first_leased_ns = self._now_ns() - self._lease_ns
        while excess_bytes > 0:
            if not self._by_age or self._by_age[0].touched_ns > first_leased_ns:
                self._by_age.extendleft(reversed(chosen))
                return None
            listed = self._by_age.popleft()
            num_bytes = self._bytes_if_untouched(listed)
            if num_bytes is not None:
                chosen.append(listed)
                excess_bytes -= num_bytes
        return chosen

    def _note_oldest_age(self) -> None:
        oldest = self._by_age[0] if self._by_age else None
        self.oldest_age_s = (self._now_ns() - oldest.touched_ns) / 1e9 if oldest else None


def _half_of_free(folder: Path, limits: StoreLimits, own_bytes: int) -> int:
    """Counts what the store takes already as free, so that every opener finds the same bound."""
    disk = shutil.disk_usage(folder)
    free_bytes = disk.free + min(own_bytes, disk.used)
    return min(limits.default_max_bytes, free_bytes // 2)
