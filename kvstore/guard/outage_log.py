"""`OutageLog`: one line when a backend fails, one when it works again, and none in between."""

import logging
import threading
import time
from collections.abc import Callable, Hashable

from kvstore.store import StoreFullError

__all__ = ["REMEDY", "OutageLog"]

REMEDY = (
    "KV is computed instead, and it is tried again every few seconds; "
    "docs/connectors.md lists the faults and their remedies"
)
"""Ends each line about an outage."""

_FULL_LOG_PERIOD_S = 30.0

_logger = logging.getLogger("baton.kvstore")


class OutageLog:
    """Logs the outages of one backend, which may have several breakers.

    An outage begins when the first of the breakers opens and ends when all are closed. A backend
    that is full is logged once in half a minute. Thread-safe.

    Args:
        name: of the backend, without secrets.
        clock: returns seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._open: set[Hashable] = set()
        self._is_logged = False
        self._is_full = False  # what was logged is that the backend is full
        self._full_logged_at = float("-inf")

    def begin(self, part: Hashable, problem: str, error: BaseException) -> None:
        """Notes that a breaker has opened, or is open for another reason than before.

        Args:
            part: the breaker.
            problem: what does not work, such as "takes no blocks".
            error: why.
        """
        with self._lock:
            self._open.add(part)
            must_log = self._must_log(is_full=isinstance(error, StoreFullError))
        if must_log:
            reason = str(error).rstrip(".")
            _logger.warning("%s %s: %s. %s", self._name, problem, reason, REMEDY)

    def end(self, part: Hashable) -> None:
        """Notes that a breaker has closed."""
        with self._lock:
            self._open.discard(part)
            must_log = self._is_logged and not self._open
            self._is_logged = self._is_logged and not must_log
        if must_log:
            _logger.info("%s answers again", self._name)

    def _must_log(self, *, is_full: bool) -> bool:
        is_news = not self._is_logged or (self._is_full and not is_full)
        now = self._clock()
        if not is_news or (is_full and now - self._full_logged_at < _FULL_LOG_PERIOD_S):
            return False
        if is_full:
            self._full_logged_at = now
        self._is_logged, self._is_full = True, is_full
        return True
