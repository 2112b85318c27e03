"""`BoundedSpace`: what is removed to keep the bound of a shared store. `SpaceBound`: the bound."""

import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kvstore.store import StoreFullError, StoreUnavailableError
from kvstore.stores.base import StoreCounters
from kvstore.url import StoreLimits

__all__ = ["BoundedSpace", "SpaceBound"]

_UPDATE_S = 1.0
_LOGGED_CHANGE = 1.25  # a bound that changed by this factor is logged again
_MIB = 1 << 20

_logger = logging.getLogger("baton.kvstore")


class SpaceBound:
    """The bound of a store: the URL's `max_bytes`, or one that follows the file system.

    Without `max_bytes` it is half of what the file system has left for the store, up to the
    store's default. What the store takes already counts as left, so that all openers find the same
    bound. It is computed anew as the store is used, because other programs fill and free the disk.
    It never falls below what the store holds: then each put makes room for what it adds, and no
    more. It is logged when it is found, and when it has changed a lot.

    Args:
        folder: the store's.
        limits: the URL's.

    Attributes:
        max_bytes: the bound; 0 before the first `update` if the URL names none.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self.max_bytes = limits.max_bytes or 0
        self._folder = folder
        self._store = limits.store
        self._default_max_bytes = limits.default_max_bytes
        self._is_fixed = limits.max_bytes is not None
        self._free_bytes = 0  # that the file system has left
        self._logged_bytes: int | None = None
        self._next_update_s = float("-inf")

    def update(self, own_bytes: int, object_bytes: int, num_more_bytes: int = 0) -> None:
        """Computes the bound anew if it is old, or if more objects would exceed one that may grow.

        Args:
            own_bytes: what the store takes of the file system.
            object_bytes: bytes of all objects.
            num_more_bytes: bytes of objects that are to be added.
        """
        if self._is_fixed:
            self._log_change()
            return
        now_s = time.monotonic()
        fits = object_bytes + num_more_bytes <= self.max_bytes
        may_grow = not fits and self.max_bytes < self._default_max_bytes
        if now_s < self._next_update_s and not may_grow:
            return
        self._next_update_s = now_s + _UPDATE_S
        disk = shutil.disk_usage(self._folder)
        self._free_bytes = disk.free
        left_bytes = disk.free + min(own_bytes, disk.used)
        wanted_bytes = min(self._default_max_bytes, left_bytes // 2)
        self.max_bytes = max(wanted_bytes, min(object_bytes, disk.used))
        self._log_change()

    def why_full(self, num_bytes: int) -> str:
        """Returns why there is no room for `num_bytes` more."""
        text = f"no room for {num_bytes} bytes: "
        if self._is_disk_full:
            return text + (
                f"disk full: {self._left()}, and all objects of the store are leased; free some "
                "space there, or lower lease_s"
            )
        return text + (
            f"the store is full of leased objects: its bound is {_size(self.max_bytes)}"
            f"{'' if self._is_fixed else f', as {self._left()}'}; raise max_bytes or lower lease_s"
        )

    def why_too_large(self, num_bytes: int) -> str:
        """Returns why an object of `num_bytes` is refused."""
        if self._is_fixed:
            return f"an object of {num_bytes} bytes exceeds max_bytes={self.max_bytes}"
        text = f"an object of {num_bytes} bytes exceeds the store's bound of {self.max_bytes} bytes"
        if self._is_disk_full or num_bytes > self._free_bytes:
            return f"disk full: {self._left()}, and {text}; free some space there"
        return f"{text}, as {self._left()}; set max_bytes"

    @property
    def _is_disk_full(self) -> bool:
        """Whether other files have taken what the store could have."""
        return not self._is_fixed and self._free_bytes < self.max_bytes // 2

    def _left(self) -> str:
        return f"{self._folder} has {_size(self._free_bytes)} left"

    def _log_change(self) -> None:
        if self._logged_bytes == self.max_bytes:
            return
        if self._logged_bytes is not None:
            lower_bytes, higher_bytes = sorted((self.max_bytes, self._logged_bytes))
            if higher_bytes <= _LOGGED_CHANGE * max(lower_bytes, _MIB):
                return
        self._logged_bytes = self.max_bytes
        reason = "max_bytes" if self._is_fixed else f"without max_bytes: {self._left()}"
        _logger.info("%s holds up to %s (%s)", self._store, _size(self.max_bytes), reason)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB" if num_bytes >= _MIB else f"{num_bytes} bytes"


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
