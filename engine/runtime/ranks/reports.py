"""`Reporter`: what a rank other than 0 reports about itself, for rank 0's metrics."""

import resource
import time
from collections.abc import Callable
from pathlib import Path

from engine.metrics.counts import RankReport

__all__ = ["Reporter"]

_INTERVAL_S = 1.0
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()


class Reporter:
    """Adds up a rank's times, and reports them after steps, once a second at most.

    Args:
        rank: number of the rank.
        send: sends a report to rank 0.
    """

    def __init__(self, rank: int, send: Callable[[RankReport], None]) -> None:
        self._rank, self._send = rank, send
        self._changed_at = time.monotonic()
        self._sent_at = self._changed_at - _INTERVAL_S
        self._step_s = self._idle_s = 0.0

    def step_begins(self) -> None:
        """Notes that a batch has arrived."""
        self._idle_s += self._since_change()

    def step_ends(self) -> None:
        """Notes that it is computed."""
        self._step_s += self._since_change()
        if self._changed_at - self._sent_at >= _INTERVAL_S:
            self._sent_at = self._changed_at
            times = self._step_s, self._idle_s, time.process_time()
            self._send(RankReport(self._rank, *times, _resident_bytes()))

    def _since_change(self) -> float:
        before, self._changed_at = self._changed_at, time.monotonic()
        return self._changed_at - before


def _resident_bytes() -> int:
    """Returns this process's memory; 0 if that cannot be read."""
    try:
        pages = _STATM.read_bytes().split()[1]
    except OSError:
        return 0
    return int(pages) * _PAGE_BYTES
