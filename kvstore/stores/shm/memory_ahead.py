"""`MemoryAhead`: a thread that allocates memory for the next put."""

import logging
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Event, Thread

from kvstore.store import StoreUnavailableError
from kvstore.stores.shm.arena import Arena

__all__ = ["MemoryAhead"]

# The result of the last put, and reads of its objects, come first.
_PAUSE_S = 0.01
_RETRY_S = 1.0  # after a failure

_logger = logging.getLogger("baton.kvstore")


class MemoryAhead:
    """Runs `Arena.provide_ahead` in a thread, once for all requests meanwhile. Thread-safe.

    Args:
        current: returns the arena that allocates the memory; None if none is open.
    """

    def __init__(self, current: Callable[[], Arena | None]) -> None:
        self._current = current
        self._changed = Condition()
        self._is_requested = False
        self._is_busy = False
        self._is_closing = Event()
        self._thread: Thread | None = None

    def request(self) -> None:
        """Lets the thread run soon if there is something to do. Returns at once."""
        if not self._is_wanted():
            return
        with self._changed:
            self._is_requested = True
            self._changed.notify_all()
            if self._thread is None and not self._is_closing.is_set():
                # A daemon: if the process ends without `close`, others free its extents.
                thread = Thread(target=self._work, name="baton-shm-ahead", daemon=True)
                with suppress(RuntimeError):  # no thread can be started; the next put tries again
                    thread.start()
                    self._thread = thread

    def close(self) -> None:
        """Ends the thread, which first completes at most one extent. Idempotent."""
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
                self._is_requested |= not is_done and self._is_wanted()
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Waits for a request; returns False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_requested or self._is_closing.is_set())
        if self._is_closing.wait(_PAUSE_S):
            return False
        with self._changed:
            self._is_requested, self._is_busy = False, True
        return True

    def _is_wanted(self) -> bool:
        arena = self._current()
        return arena is not None and arena.wants_ahead

    def _provide(self) -> bool:
        """Allocates memory; returns whether that succeeded."""
        arena = self._current()
        try:
            if arena is not None:
                arena.provide_ahead(self._is_closing)
            return True
        except (OSError, StoreUnavailableError):
            pass  # the next put that needs the memory raises
        except Exception:
            _logger.exception("no memory is made ready ahead in shared memory")
        return False
