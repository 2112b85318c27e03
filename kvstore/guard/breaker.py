"""`Breaker`: stops calls to a backend that does not answer, so that callers need not wait."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvstore.guard.outage_log import OutageLog
from kvstore.store import PartlyUnavailableError, StoreFullError, StoreUnavailableError

__all__ = ["Breaker", "BreakerCounts", "NotAskedError", "log_level_of"]

_FIRST_COOLDOWN_S = 1.0
_MAX_COOLDOWN_S = 8.0
# Each cool-down is shortened by up to this share, so that not all processes probe at once.
_JITTER = 0.2
# A full backend answers at once, and has room again when the next lease ends; but to look for room
# may take it long.
_FULL_COOLDOWN_S = 0.1

_Result = TypeVar("_Result")


class NotAskedError(StoreUnavailableError):
    """A breaker is open: the backend was not called."""

    is_logged = True


def log_level_of(error: StoreUnavailableError) -> int:
    """Returns the level to log a failure at: a breaker has already logged the outage."""
    is_logged = error.is_logged or isinstance(error, StoreFullError)
    return logging.DEBUG if is_logged else logging.WARNING


@dataclass(frozen=True, slots=True)
class BreakerCounts:
    """The state of one or more breakers, for Prometheus.

    Attributes:
        num_open: breakers that are open now.
        num_opened: how often one has opened since the start.
    """

    num_open: int
    num_opened: int


class Breaker:
    """Passes calls on until one fails; then it opens, until a probe succeeds.

    While it is open, calls fail at once with `NotAskedError`. A probe is due after each cool-down:
    one of the calls, or, if `probes_with_calls` is false, what is passed to `probe`, so that no
    caller waits. If the probe succeeds the breaker closes, and if it fails the next cool-down is
    twice as long, up to eight seconds. So an outage costs one timeout per cool-down and not one
    per call. A breaker that opens again soon after it has closed continues with the cool-downs
    where it was. Thread-safe.

    A backend that is full (`StoreFullError`) answers at once, so one of the calls is its probe in
    any case, after a tenth of a second, every time. A backend of several servers that
    has breakers of its own (`PartlyUnavailableError`) is asked always.

    Args:
        name: what is called, for errors.
        clock: returns seconds.
        draw: returns a number from 0 to 1, which shortens a cool-down.
        log: logs when the breaker opens and closes, and nothing in between; None for its own.
        problem: what does not work while it is open, for the log.

    Attributes:
        num_opened: how often it has opened.
        problem: see above.
        probes_with_calls: see above.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        log: OutageLog | None = None,
        problem: str = "cannot be used",
    ) -> None:
        self.num_opened = 0
        self.problem = problem
        self.probes_with_calls = True
        self._name = name
        self._clock = clock
        self._draw = draw
        self._log = log or OutageLog(name, clock)
        self._lock = threading.Lock()
        self._probe_at: float | None = None  # None while closed
        self._cooldown_s = _FIRST_COOLDOWN_S
        self._closed_at = float("-inf")
        self._error: BaseException | None = None  # the last one, while open

    @property
    def is_open(self) -> bool:
        """Whether calls fail at once."""
        return self._probe_at is not None

    @property
    def error(self) -> str:
        """Why it is open; empty while it is closed."""
        error = self._error
        return "" if error is None else str(error)

    @property
    def is_full(self) -> bool:
        """Whether it is open because the backend is full."""
        return isinstance(self._error, StoreFullError)

    @property
    def due_in_s(self) -> float | None:
        """Seconds until the next probe is due, infinite while one is made; None while closed."""
        probe_at = self._probe_at
        return None if probe_at is None else max(0.0, probe_at - self._clock())

    @property
    def counts(self) -> BreakerCounts:
        """The state of this breaker alone."""
        return BreakerCounts(int(self.is_open), self.num_opened)

    def call(self, call: Callable[[], _Result]) -> _Result:
        """Makes a call, unless the breaker is open and this is not the probe.

        Raises:
            NotAskedError: the call was not made.
            Exception: the call raised it.
        """
        with self.guard():
            return call()

    def probe(self, call: Callable[[], _Result]) -> _Result:
        """Makes a call, also as the probe that is due.

        Raises:
            NotAskedError: no probe is due.
            Exception: the call raised it.
        """
        with self.guard(may_probe=True):
            return call()

    @contextmanager
    def guard(self, *, may_probe: bool = False) -> Iterator[None]:
        """Makes the block the call, as `call` does, or, with `may_probe`, as `probe` does.

        Raises:
            NotAskedError: the block was not entered.
        """
        is_probe = self._enter(may_probe=may_probe or self.probes_with_calls or self.is_full)
        try:
            yield
        except PartlyUnavailableError:
            if self.is_open:
                self._close()  # the backend answers, and leaves the server alone itself
            raise
        except BaseException as error:
            self._fail(error, is_probe=is_probe)
            raise
        if self.is_open:
            self._close()

    def open(self, error: StoreUnavailableError) -> None:
        """Opens as if a call had failed; another breaker of the same backend has found it out."""
        if not isinstance(error, PartlyUnavailableError):
            self._fail(error, is_probe=False)

    def _enter(self, *, may_probe: bool) -> bool:
        """Admits a call; returns whether it is the probe."""
        with self._lock:
            if self._probe_at is None:
                return False
            if not may_probe or self._clock() < self._probe_at:
                raise NotAskedError(f"{self._name} did not answer a moment ago")
            # No other call is admitted before the probe ends.
            self._probe_at = float("inf")
            return True

    def _fail(self, error: BaseException, *, is_probe: bool) -> None:
        if isinstance(error, StoreUnavailableError):
            error.is_logged = True
        with self._lock:
            was_open = self.is_open
            if was_open and not is_probe:
                return  # the call began before the breaker opened, so this is no news
            now = self._clock()
            is_same = was_open or now - self._closed_at < 2 * self._cooldown_s
            is_full = isinstance(error, StoreFullError)
            self._cooldown_s = self._next_cooldown_s(is_same=is_same, is_full=is_full)
            self._error = error
            self._probe_at = now + self._cooldown_s * (1 - _JITTER * self._draw())
            self.num_opened += not was_open
        self._log.begin(self, self.problem, error)

    def _next_cooldown_s(self, *, is_same: bool, is_full: bool) -> float:
        """Returns the next cool-down; `is_same` says whether the last outage goes on."""
        if is_full:
            return _FULL_COOLDOWN_S
        if not is_same:
            return _FIRST_COOLDOWN_S
        longer_s = max(2 * self._cooldown_s, _FIRST_COOLDOWN_S)
        return min(longer_s, _MAX_COOLDOWN_S)

    def _close(self) -> None:
        with self._lock:
            self._probe_at = self._error = None
            self._closed_at = self._clock()
        self._log.end(self)
