"""`ReplicaBreaker` and `Silence`: whether a replica takes requests, and whether it is lost. Pure.

Ejection follows Envoy's outlier detection, slow start its slow-start window with aggression 1.

How much silence is too much depends on how regular the reports were, as in an accrual failure
detector (Hayashibara et al. 2004). A worker on a crowded machine, whose reports are late, is given
more time than one whose reports come in time.
"""

import logging
from collections.abc import Callable

__all__ = ["ReplicaBreaker", "Silence"]

_LOGGER = logging.getLogger("baton.router")
_MAX_FAILURES = 3
"""One request may fail on every replica; after three in a row the replica is probably broken."""
_FIRST_COOLDOWN_S = 1.0
_MAX_COOLDOWN_S = 30.0
_SLOW_START_S = 10.0
_NUM_STEPS = 10
"""The weight grows in steps, so that replicas which started together have equal weights."""
_REPORT_INTERVAL_S = 0.25
"""Workers send a report at least this often (`WatchLoad`)."""
_MIN_SILENCE_S = 1.25
_MAX_SILENCE_S = 10.0
_LATENESS_FACTOR = 4
_DECAY = 0.98
"""Per report; lateness is forgotten by half in about nine seconds."""


class ReplicaBreaker:
    """The failures of one replica, and the share of the load that it should get.

    It opens after three failures in a row. After a cool-down it lets one request through, and one
    more after each further cool-down, until one of them ends. A success closes it; a failure
    doubles the cool-down, up to half a minute. When it has closed, and when the replica is new,
    the replica's weight grows from 0.1 to 1 within ten seconds.

    Args:
        name: of the replica, for logs.
        clock: returns seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._started_at = clock()
        self._num_begun = 0
        self._num_failures = 0
        self._since = 0  # calls up to this number say nothing about the replica as it is now
        self._cooldown_s = _FIRST_COOLDOWN_S
        self._probe_at: float | None = None  # None while closed

    @property
    def is_open(self) -> bool:
        """Whether no request should go to the replica now."""
        return self._probe_at is not None and self._clock() < self._probe_at

    @property
    def weight(self) -> float:
        """The share of its usual load that the replica should get, from 0.1 to 1."""
        since_start_s = self._clock() - self._started_at
        if since_start_s >= _SLOW_START_S:
            return 1.0
        step = int(since_start_s / _SLOW_START_S * _NUM_STEPS)
        return min(max(step, 1), _NUM_STEPS) / _NUM_STEPS

    def begin(self) -> int:
        """Notes that a request goes to the replica; returns its number.

        While the breaker is open, each further request waits for the next cool-down.
        """
        self._num_begun += 1
        if self._probe_at is not None and not self.is_open:
            self._probe_at = self._clock() + self._cooldown_s
        return self._num_begun

    def succeed(self, call: int) -> None:
        """Notes that a request has ended well.

        The success of one that began before the first of the last failures, or before the breaker
        opened, does not count: it says nothing about the replica as it is now.
        """
        if call <= self._since:
            return
        self._num_failures = 0
        if self._probe_at is not None:
            self._probe_at = None
            self._started_at = self._clock()
            _LOGGER.info("%s is used again, with a slow start", self._name)

    def fail(self, call: int) -> None:
        """Notes that a request has failed. While open, only one that began since then counts."""
        if self._probe_at is None:
            if self._num_failures == 0:
                self._since = self._num_begun
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                _LOGGER.warning(
                    "%s is ejected: %d calls in a row have failed", self._name, _MAX_FAILURES
                )
                self._open(_FIRST_COOLDOWN_S)
        elif call > self._since:
            self._open(min(2 * self._cooldown_s, _MAX_COOLDOWN_S))

    def _open(self, cooldown_s: float) -> None:
        self._cooldown_s = cooldown_s
        self._probe_at = self._clock() + cooldown_s
        self._since = self._num_begun


class Silence:
    """The reports of one worker.

    Args:
        now: seconds, of a monotonic clock, at which the worker was connected.

    Attributes:
        has_reported: whether a report has come.
    """

    def __init__(self, now: float) -> None:
        self._last = now
        self._lateness_s = 0.0
        self.has_reported = False

    @property
    def limit_s(self) -> float:
        """The longest silence that is allowed now. A worker's first report may take longer."""
        if not self.has_reported:
            return _MAX_SILENCE_S
        return min(_MIN_SILENCE_S + _LATENESS_FACTOR * self._lateness_s, _MAX_SILENCE_S)

    def report(self, now: float) -> None:
        """Notes a report."""
        if self.has_reported:
            late_s = max(now - self._last - _REPORT_INTERVAL_S, 0.0)
            self._lateness_s = max(late_s, self._lateness_s * _DECAY)
        self.has_reported = True
        self._last = now

    def excuse(self, seconds: float, now: float) -> None:
        """Notes that reports may not have been read for some time: this process was late itself."""
        self._last = min(self._last + seconds, now)

    def is_too_long(self, now: float) -> bool:
        """Whether the worker has sent nothing for longer than allowed."""
        return now - self._last > self.limit_s
