"""`VirtualTime`: calls functions in the order of their times, without waiting. Pure."""

import heapq
import itertools
from collections.abc import Callable

__all__ = ["VirtualTime"]


class VirtualTime:
    """A clock that jumps to the next call.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def clock(self) -> float:
        """Returns `now`, for parts that take a clock."""
        return self.now

    def call_at(self, time_s: float, function: Callable[[], None]) -> None:
        """Has a function called at a time; calls of one time keep their order."""
        heapq.heappush(self._calls, (max(time_s, self.now), next(self._numbers), function))

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Has a function called after a delay."""
        self.call_at(self.now + delay_s, function)

    def run(self) -> None:
        """Makes all calls, also those that calls add."""
        while self._calls:
            self.now, _, function = heapq.heappop(self._calls)
            function()
