"""`BoundedSpace`: the bound of a store that processes share, and what is removed to keep it."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kvstore.store import StoreFullError, StoreUnavailableError
from kvstore.stores.base import StoreCounters
from kvstore.stores.space_bound import SpaceBound
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

    Opening a space evicts nothing: only a put makes room, for what it adds.

    Args:
        folder: the store's.
        limits: the URL's.
        counters: of the store that uses the space; they count removals.

    Attributes:
        counters: see above.
        oldest_age_s: seconds since the oldest object was touched, as of the last listing or
            eviction; None if no old object was known.
    """

    def __init__(
        self, folder: Path, limits: StoreLimits, counters: StoreCounters | None = None
    ) -> None:
        self.counters = counters or StoreCounters(sees_removals=True)
        self.oldest_age_s: float | None = None
        self._bound = SpaceBound(folder, limits)
        self._is_diagnosis = limits.is_diagnosis
        self._ttl_ns, self._lease_ns = int(limits.ttl_s * 1e9), int(limits.lease_s * 1e9)
        self._by_age: deque[_Listed] = deque()

    @property
    def max_bytes(self) -> int:
        """The bound of all objects together; see `SpaceBound`."""
        return self._bound.max_bytes

    def remove_outdated(self) -> None:
        """Removes expired objects and what dead writers left. A diagnosis removes nothing."""
        if not self._is_diagnosis:
            self.list_objects()

    def make_room(self, num_bytes: int) -> None:
        """Evicts objects until `num_bytes` more fit the bound. A diagnosis evicts nothing.

        Raises:
            StoreFullError: leased objects leave too little room; none was evicted.
            StoreUnavailableError: the bound is less than that.
        """
        self._bound.update(self._own_bytes(), self._object_bytes(), num_bytes)
        if num_bytes > self.max_bytes:
            raise StoreUnavailableError(self._bound.why_too_large(num_bytes))
        if self._is_diagnosis:
            return
        while (excess_bytes := self._object_bytes() + num_bytes - self.max_bytes) > 0:
            chosen = self._choose_evicted(excess_bytes)
            if chosen is None:
                self.list_objects()
                excess_bytes = self._object_bytes() + num_bytes - self.max_bytes
                chosen = self._choose_evicted(excess_bytes)
            if chosen is None:
                raise StoreFullError(self._bound.why_full(num_bytes))
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

    def _own_bytes(self) -> int:
        """Returns the bytes that the store takes of the file system."""
        return self._object_bytes()

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
