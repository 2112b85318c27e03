"""`MemoryAhead`: the thread that makes memory ready for what will be put next."""

import logging
from contextlib import suppress
from threading import Condition, Event, Thread

from kvstore.store import StoreUnavailableError
from kvstore.stores.shm.arena import Arena

__all__ = ["MemoryAhead"]

# What was just put is about to be told and read: that comes first.
_PAUSE_S = 0.01
_RETRY_S = 1.0  # after a failure

_logger = logging.getLogger("baton.kvstore")


class MemoryAhead:
    """Has an arena make memory ready, once for all who asked meanwhile. Thread-safe.

    Args:
        arena: which.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._changed = Condition()
        self._is_asked = False
        self._is_busy = False
        self._is_closing = Event()
        self._thread: Thread | None = None

    def ask(self) -> None:
        """Has it done soon, if there is something to do. Returns at once."""
        if not self._arena.wants_ahead:
            return
        with self._changed:
            self._is_asked = True
            self._changed.notify_all()
            if self._thread is None and not self._is_closing.is_set():
                # A process that ends without `close` does not wait for it: others free its extents.
                thread = Thread(target=self._work, name="baton-shm-ahead", daemon=True)
                with suppress(RuntimeError):  # none is to be had just now: who puts next asks again
                    thread.start()
                    self._thread = thread

    def close(self) -> None:
        """Ends the thread, which is at one extent at most. Idempotent."""
        with self._changed:
            self._is_closing.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while self._begin():
            is_done = self._provide()
            if not is_done:
                self._is_closing.wait(_RETRY_S)
            with self._changed:
                self._is_busy = False
                self._is_asked |= not is_done and self._arena.wants_ahead
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Waits for somebody to ask; whether to go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_asked or self._is_closing.is_set())
        if self._is_closing.wait(_PAUSE_S):
            return False
        with self._changed:
            self._is_asked, self._is_busy = False, True
        return True

    def _provide(self) -> bool:
        """Whether that went well."""
        try:
            self._arena.provide_ahead(self._is_closing)
            return True
        except (OSError, StoreUnavailableError):
            pass  # who puts next will hear of it
        except Exception:
            _logger.exception("no memory is made ready ahead in shared memory")
        return False
