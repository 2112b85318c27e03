"""`Settlements`: waits for transfers of which nobody knows whether they still write."""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.quarantine import QUARANTINE_S

__all__ = ["Settlements"]

_PERIOD_S = 0.5

_logger = logging.getLogger("baton.kvstore")


@dataclass(slots=True, eq=False)
class _Doubt:
    """One transfer.

    Attributes:
        ask: whether it has settled.
        give_up_at: when nobody waits for it any longer.
        has_failed: whether to ask has failed, and that was logged.
        settled: set once it has settled.
    """

    ask: Callable[[], bool]
    give_up_at: float
    has_failed: bool = False
    settled: threading.Event = field(default_factory=threading.Event)


class Settlements:
    """Asks again and again, in a thread that lives while there is something to ask.

    Of staging segments, what has not settled after `QUARANTINE_S` is asked for no longer: they are
    used again by then, and never trusted.

    Args:
        wake: called when something has settled, or nobody waits for it any longer.
        clock: seconds, monotonic.
    """

    def __init__(
        self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._open: list[_Doubt] = []
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def num_open(self) -> int:
        """Transfers that are asked for."""
        return len(self._open)

    def add(self, has_settled: Callable[[], bool], *, for_good: bool = False) -> Callable[[], bool]:
        """Begins to ask `has_settled`; tells what was last known of it.

        Args:
            has_settled: what to ask.
            for_good: of memory that is not used before it has settled.
        """
        doubt = _Doubt(has_settled, math.inf if for_good else self._clock() + QUARANTINE_S)
        with self._lock:
            self._open.append(doubt)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="baton-kv-settle", daemon=True
                )
                self._thread.start()
        return doubt.settled.is_set

    def close(self) -> None:
        """Ends the thread. What has not settled never will. Idempotent."""
        self._closed.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            for doubt in list(self._open):
                if self._is_over(doubt):
                    self._open.remove(doubt)
                    self._wake()
            with self._lock:
                if not self._open:
                    self._thread = None
                    return

    def _is_over(self, doubt: _Doubt) -> bool:
        """Whether a transfer has settled, or nobody waits for it any longer."""
        try:
            if doubt.ask():
                doubt.settled.set()
                return True
        except Exception:  # asked again
            level = logging.DEBUG if doubt.has_failed else logging.ERROR
            doubt.has_failed = True
            _logger.log(level, "whether a KV transfer has settled is not known", exc_info=True)
        return self._clock() >= doubt.give_up_at
