"""`StepClock`: times parts of a step from outside, by wrapping functions. Pure."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

__all__ = ["StepClock"]


class StepClock:
    """Adds up, phase by phase, the time spent in wrapped functions.

    A wrapped function that calls another does not count the other's time.

    Args:
        settle: called before each reading of the clock; waits for a device that
            works beside its caller.
        now_ns: the clock.
    """

    def __init__(
        self,
        settle: Callable[[], object] = lambda: None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._settle, self._now_ns = settle, now_ns
        self._spent_ns: dict[str, int] = defaultdict(int)
        self._inner_ns = [0]
        """Per function that runs now, time that its wrapped callees took."""

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts as `phase`'s."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started_ns = self._read()
            self._inner_ns.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                took_ns = self._read() - started_ns
                self._spent_ns[phase] += took_ns - self._inner_ns.pop()
                self._inner_ns[-1] += took_ns

        return wrapper

    def take(self) -> dict[str, int]:
        """Nanoseconds per phase since the last call."""
        spent, self._spent_ns = self._spent_ns, defaultdict(int)
        return dict(spent)

    def _read(self) -> int:
        self._settle()
        return self._now_ns()
