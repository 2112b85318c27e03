"""`RestartDelays`: how soon a process that died is started again."""

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["RestartDelays", "RestartPolicy"]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The delays before restarts, and the time a process may take to stop.

    A process that served before it died starts again at once, `max_restarts_at_once` times in a
    row and in the long run once every `restart_interval_s`. For one that dies before it serves,
    the delay doubles from `first_delay_s` to `max_delay_s`, until a start succeeds.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    max_restarts_at_once: int = 5
    restart_interval_s: float = 2.0
    stop_grace_s: float = 10.0


class RestartDelays:
    """The delays of one process.

    Args:
        policy: their lengths.
        clock: returns the time in seconds.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._delay_s = policy.first_delay_s
        self._restarts_left = float(policy.max_restarts_at_once)
        self._counted_at = clock()

    def next_s(self, *, has_served: bool) -> float:
        """Returns the delay before the next start.

        Args:
            has_served: whether the process was serving before it died.
        """
        if has_served:
            self._delay_s = self._policy.first_delay_s
            return self._take_restart()
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, self._policy.max_delay_s)
        return delay_s

    def _take_restart(self) -> float:
        """Takes a restart out of a token bucket; returns the time until the bucket has it."""
        policy, now = self._policy, self._clock()
        gained = (now - self._counted_at) / policy.restart_interval_s
        self._counted_at = now
        self._restarts_left = min(self._restarts_left + gained, policy.max_restarts_at_once) - 1
        return max(0.0, -self._restarts_left * policy.restart_interval_s)
