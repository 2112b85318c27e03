"""`Breaker`: spares a backend that does not answer, and whoever would wait for it."""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.store import Frame, GetStatus, KvStore, StoreUnavailableError

__all__ = ["Breaker", "BreakerCounts", "BreakerStore", "NotAskedError", "log_level_of"]

_FIRST_COOLDOWN_S = 1.0
_LONGEST_COOLDOWN_S = 30.0
# Each cool-down is shortened by up to this share, so that not all processes probe at once.
_JITTER = 0.2

_logger = logging.getLogger("baton.kvstore")

_Result = TypeVar("_Result")


class NotAskedError(StoreUnavailableError):
    """A breaker is open: nothing was called."""


def log_level_of(error: StoreUnavailableError) -> int:
    """How loud a call's failure is: a breaker has told of an outage, its calls need not."""
    return logging.DEBUG if isinstance(error, NotAskedError) else logging.WARNING


@dataclass(frozen=True, slots=True)
class BreakerCounts:
    """What one or more breakers tell Prometheus.

    Attributes:
        num_open: breakers that are open now.
        num_opened: how often one has opened; it never goes down.
    """

    num_open: int
    num_opened: int


class Breaker:
    """Passes calls on until one fails; then one at a time, after a cool-down each.

    While it is open, every other call fails at once with `NotAskedError`.
    The call that goes through is the probe: if it succeeds the breaker closes,
    and if it fails the next cool-down is twice as long, up to half a minute. So
    an outage costs one timeout per cool-down and not one per call. It logs when
    it opens and when it closes, and nothing in between. Thread-safe.

    Args:
        name: of what is called, for the log and the errors.
        clock: seconds.
        draw: a number from 0 to 1, which shortens a cool-down.

    Attributes:
        num_opened: how often it has opened.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.num_opened = 0
        self._name = name
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._probe_at: float | None = None  # None while closed
        self._cooldown_s = _FIRST_COOLDOWN_S

    @property
    def is_open(self) -> bool:
        """Whether calls fail at once."""
        return self._probe_at is not None

    @property
    def counts(self) -> BreakerCounts:
        """Its own."""
        return BreakerCounts(int(self.is_open), self.num_opened)

    def call(self, call: Callable[[], _Result]) -> _Result:
        """Calls, unless the breaker is open and this is not the probe.

        Raises:
            NotAskedError: nothing was called.
            Exception: whatever the call raised.
        """
        is_probe = self._enter()
        try:
            result = call()
        except BaseException as error:
            self._fail(error, is_probe=is_probe)
            raise
        if self.is_open:
            self._close()
        return result

    def _enter(self) -> bool:
        """Whether the call that enters is the probe."""
        with self._lock:
            if self._probe_at is None:
                return False
            if self._clock() < self._probe_at:
                raise NotAskedError(f"{self._name} did not answer a moment ago")
            # Nobody else's turn comes while the probe is out.
            self._probe_at = float("inf")
            return True

    def _fail(self, error: BaseException, *, is_probe: bool) -> None:
        with self._lock:
            was_open = self.is_open
            if was_open and not is_probe:
                return  # it began before the breaker opened, and tells nothing new
            self._cooldown_s = (
                min(2 * self._cooldown_s, _LONGEST_COOLDOWN_S) if was_open else _FIRST_COOLDOWN_S
            )
            self._probe_at = self._clock() + self._cooldown_s * (1 - _JITTER * self._draw())
            self.num_opened += not was_open
        if not was_open:
            _logger.warning("%s is left alone for a while: %s", self._name, error)

    def _close(self) -> None:
        with self._lock:
            was_open, self._probe_at = self.is_open, None
        if was_open:
            _logger.info("%s answers again", self._name)


class BreakerStore:
    """Wraps a store in breakers: one for reads, one for puts and one for deletions, since a store
    that is full still serves what it has, and what is corrupt must go from it.

    Args:
        store: closed with the wrapper.
        clock: seconds.

    Attributes:
        breakers: all three, for metrics.
    """

    def __init__(self, store: KvStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._reads = Breaker("the KV store, for reads,", clock)
        self._puts = Breaker("the KV store, for writes,", clock)
        self._deletions = Breaker("the KV store, for deletions,", clock)
        self.breakers = (self._reads, self._puts, self._deletions)

    def put_many(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """See `KvStore.put_many`."""
        self._puts.call(lambda: self._store.put_many(keys, values))

    def put_frames(self, keys: Sequence[bytes], frames: Sequence[Frame]) -> None:
        """See `KvStore.put_frames`."""
        self._puts.call(lambda: self._store.put_frames(keys, frames))

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[GetStatus]:
        """See `KvStore.get_many_into`."""
        return self._reads.call(lambda: self._store.get_many_into(keys, buffers))

    def get_frames_into(self, keys: Sequence[bytes], frames: Sequence[Frame]) -> list[GetStatus]:
        """See `KvStore.get_frames_into`."""
        return self._reads.call(lambda: self._store.get_frames_into(keys, frames))

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.contains_prefix`."""
        return self._reads.call(lambda: self._store.contains_prefix(keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.delete`."""
        return self._deletions.call(lambda: self._store.delete(keys))

    def close(self) -> None:
        """See `KvStore.close`."""
        self._store.close()
