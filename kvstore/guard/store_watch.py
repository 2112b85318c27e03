"""`StoreWatch`: a thread that asks a store whether it answers and which one it is.

It asks when the worker starts, every few seconds, and, while a breaker is open, after each
cool-down. So an outage is noticed and logged before a request meets it, no request waits for a
store that was found not to answer, and a store that works again is used at once.
"""

import logging
import threading
import time
from collections.abc import Callable

from kvstore.guard.guarded_store import GuardedStore
from kvstore.store import StoreUnavailableError

__all__ = ["StableIdentity", "StoreWatch"]

_CHECK_INTERVAL_S = 5.0
# Two checks of every other process that shares the store.
_SETTLED_S = 2 * _CHECK_INTERVAL_S + 2.0

_logger = logging.getLogger("baton.kvstore")


class StableIdentity:
    """A store's identity, unknown for a while after it has changed.

    When a store is emptied, its processes see its new identity at different moments. Until all of
    them have, they must not look as if they had different stores. Pure.

    Args:
        clock: returns seconds.

    Attributes:
        value: the identity; empty while it is unknown.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.value = ""
        self._clock = clock
        self._last = ""
        self._changed_at = float("-inf")

    def update(self, seen: str) -> None:
        """Notes the identity that the store shows now; an empty text changes nothing."""
        if not seen:
            return
        if self._last and seen != self._last:
            self._changed_at = self._clock()
        self._last = seen
        is_settled = self._clock() - self._changed_at >= _SETTLED_S
        self.value = seen if is_settled else ""


class StoreWatch:
    """Watches a store from its construction until `close`.

    Args:
        guarded: the store.
    """

    def __init__(self, guarded: GuardedStore) -> None:
        self._guarded = guarded
        self._identity = StableIdentity()
        self._is_closed = False
        self._woken = threading.Event()
        guarded.probe_apart_from_calls()
        guarded.on_open = self._woken.set
        self._thread = threading.Thread(target=self._run, name="baton-kv-watch", daemon=True)
        self._thread.start()

    @property
    def identity(self) -> str:
        """The store's identity; empty while it is unknown."""
        return self._identity.value

    def close(self) -> bool:
        """Ends the thread. Idempotent.

        Returns:
            Whether it makes no call any more; it does not wait for one that hangs.
        """
        self._is_closed = True
        self._woken.set()
        self._thread.join(self._guarded.store.timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        next_check_at = time.monotonic()
        while not self._is_closed:
            self._woken.clear()
            try:
                if time.monotonic() >= next_check_at:
                    next_check_at = time.monotonic() + _CHECK_INTERVAL_S
                    self._check()
                due_s = self._guarded.probe_due()
            except Exception:
                _logger.exception("%s: it cannot be checked", self._guarded.name)
                due_s = None
            left_s = max(0.0, next_check_at - time.monotonic())
            if not self._is_closed:
                self._woken.wait(left_s if due_s is None else min(left_s, due_s))

    def _check(self) -> None:
        if self._guarded.answers:
            self._guarded.check()
        if self._guarded.answers:
            try:
                self._identity.update(self._guarded.store.identity())
            except StoreUnavailableError as error:  # a store may serve all but this
                _logger.debug("%s: its identity cannot be read: %s", self._guarded.name, error)
