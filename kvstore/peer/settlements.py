"""`Settlements`: waits for transfers of which nobody knows whether they still write."""

import logging
import threading
from collections.abc import Callable

__all__ = ["Settlements"]

_PERIOD_S = 0.5

_logger = logging.getLogger("baton.kvstore")


class Settlements:
    """Asks again and again, in a thread that lives while there is something to ask.

    Args:
        wake: called when something has settled.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._open: list[tuple[Callable[[], bool], threading.Event]] = []
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def num_open(self) -> int:
        """Transfers that have not settled."""
        return len(self._open)

    def add(self, has_settled: Callable[[], bool]) -> Callable[[], bool]:
        """Begins to ask `has_settled`; tells what was last known of it."""
        settled = threading.Event()
        with self._lock:
            self._open.append((has_settled, settled))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="baton-kv-settle", daemon=True
                )
                self._thread.start()
        return settled.is_set

    def close(self) -> None:
        """Ends the thread. What has not settled never will. Idempotent."""
        self._closed.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            for entry in list(self._open):
                if self._ask(entry[0]):
                    entry[1].set()
                    self._open.remove(entry)
                    self._wake()
            with self._lock:
                if not self._open:
                    self._thread = None
                    return

    def _ask(self, has_settled: Callable[[], bool]) -> bool:
        try:
            return has_settled()
        except Exception:  # asked again
            _logger.exception("whether a KV transfer has settled is not known")
            return False
