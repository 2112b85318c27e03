"""`Silence`: decides when a worker that sends no reports any more is given up. Pure.

How much silence is too much depends on how regular the reports were, as in an accrual failure
detector (Hayashibara et al. 2004). A worker on a crowded machine, whose reports are late, is given
more time than one whose reports come in time.
"""

__all__ = ["Silence"]

_INTERVAL_S = 0.25
"""Workers send a report at least this often (`WatchLoad`)."""
_MIN_S = 1.25
_MAX_S = 10.0
_LATENESS_FACTOR = 4
_DECAY = 0.98
"""Per report; lateness is forgotten by half in about nine seconds."""


class Silence:
    """The reports of one worker.

    Args:
        now: seconds, of a monotonic clock, at which the worker was connected.
    """

    def __init__(self, now: float) -> None:
        self._last = now
        self._lateness_s = 0.0
        self._has_reported = False

    @property
    def limit_s(self) -> float:
        """The longest silence that is allowed now. A worker's first report may take longer."""
        if not self._has_reported:
            return _MAX_S
        return min(_MIN_S + _LATENESS_FACTOR * self._lateness_s, _MAX_S)

    def report(self, now: float) -> None:
        """Notes a report."""
        if self._has_reported:
            late_s = max(now - self._last - _INTERVAL_S, 0.0)
            self._lateness_s = max(late_s, self._lateness_s * _DECAY)
        self._has_reported = True
        self._last = now

    def excuse(self, seconds: float, now: float) -> None:
        """Notes that reports may not have been read for some time: this process was late itself."""
        self._last = min(self._last + seconds, now)

    def is_too_long(self, now: float) -> bool:
        """Whether the worker has sent nothing for longer than allowed."""
        return now - self._last > self.limit_s
