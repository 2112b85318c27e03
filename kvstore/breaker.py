"""`Breaker`: stops calls to a backend that does not answer, so that callers need not wait."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvstore.store import PartlyUnavailableError, StoreFullError, StoreUnavailableError

__all__ = ["Breaker", "BreakerCounts", "NotAskedError", "log_level_of"]

_FIRST_COOLDOWN_S = 1.0
_LONGEST_COOLDOWN_S = 30.0
# Each cool-down is shortened by up to this share, so that not all processes probe at once.
_JITTER = 0.2
# A full backend answers at once, and has room again when the next lease ends; but to look for room
# may take it long.
_FULL_COOLDOWN_S = 0.1
_FULL_LOG_PERIOD_S = 30.0

_logger = logging.getLogger("baton.kvstore")

_Result = TypeVar("_Result")


class NotAskedError(StoreUnavailableError):
    """A breaker is open: the backend was not called."""


def log_level_of(error: StoreUnavailableError) -> int:
    """Returns the level to log a failure at: a breaker has already logged the outage."""
    is_logged = isinstance(error, NotAskedError | StoreFullError | PartlyUnavailableError)
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
    """Passes calls on until one fails; then it opens, and passes one on after each cool-down.

    While it is open, all other calls fail at once with `NotAskedError`. The call
    that it passes on is the probe: if the probe succeeds the breaker closes, and
    if it fails the next cool-down is twice as long, up to half a minute. So an
    outage costs one timeout per cool-down and not one per call. The breaker logs
    when it opens and when it closes, and nothing in between. Thread-safe.

    A backend that is full (`StoreFullError`) is asked again after a tenth of a
    second, every time; that is logged once in half a minute. A backend of several
    servers that has breakers of its own (`PartlyUnavailableError`) is asked always.

    Args:
        name: what is called, for logs and errors.
        clock: returns seconds.
        draw: returns a number from 0 to 1, which shortens a cool-down.

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
        self._full_logged_at = float("-inf")
        self._is_logged = False  # that it is open

    @property
    def is_open(self) -> bool:
        """Whether calls fail at once."""
        return self._probe_at is not None

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

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Makes the block the call, as `call` does.

        Raises:
            NotAskedError: the block was not entered.
        """
        is_probe = self._enter()
        try:
            yield
        except PartlyUnavailableError:
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

    def _enter(self) -> bool:
        """Admits a call; returns whether it is the probe."""
        with self._lock:
            if self._probe_at is None:
                return False
            if self._clock() < self._probe_at:
                raise NotAskedError(f"{self._name} did not answer a moment ago")
            # No other call is admitted before the probe ends.
            self._probe_at = float("inf")
            return True

    def _fail(self, error: BaseException, *, is_probe: bool) -> None:
        with self._lock:
            was_open = self.is_open
            if was_open and not is_probe:
                return  # the call began before the breaker opened, so this is no news
            is_full = isinstance(error, StoreFullError)
            self._cooldown_s = self._next_cooldown_s(was_open=was_open, is_full=is_full)
            self._probe_at = self._clock() + self._cooldown_s * (1 - _JITTER * self._draw())
            self.num_opened += not was_open
            must_log = not self._is_logged and self._may_log(is_full=is_full)
            self._is_logged |= must_log
        if must_log:
            _logger.warning("%s is left alone for a while: %s", self._name, error)

    def _next_cooldown_s(self, *, was_open: bool, is_full: bool) -> float:
        if is_full:
            return _FULL_COOLDOWN_S
        if not was_open:
            return _FIRST_COOLDOWN_S
        longer_s = max(2 * self._cooldown_s, _FIRST_COOLDOWN_S)
        return min(longer_s, _LONGEST_COOLDOWN_S)

    def _may_log(self, *, is_full: bool) -> bool:
        now = self._clock()
        if is_full and now - self._full_logged_at < _FULL_LOG_PERIOD_S:
            return False
        if is_full:
            self._full_logged_at = now
        return True

    def _close(self) -> None:
        with self._lock:
            self._probe_at = None
            was_logged, self._is_logged = self._is_logged, False
        if was_logged:
            _logger.info("%s answers again", self._name)
