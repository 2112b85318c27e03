"""Means and sums in which numbers weigh less the older they are. Pure.

A number's weight falls to 1/e in the time that is called the memory.
"""

import math

__all__ = ["FadingMean", "FadingShare", "FadingSum"]


class FadingMean:
    """The mean of numbers that weigh less the older they are.

    Args:
        memory_s: seconds in which a number's weight falls to 1/e.

    Attributes:
        value: the mean; 0 without numbers.
        updated_at: when the last number came.
    """

    def __init__(self, memory_s: float) -> None:
        self.value = 0.0
        self.updated_at = 0.0
        self._memory_s = memory_s
        self._weight = 0.0

    def add(self, number: float, now: float, weight: float = 1.0) -> None:
        """Takes a number, which weighs `weight` now."""
        kept = math.exp((self.updated_at - now) / self._memory_s)
        self._weight = self._weight * kept + weight
        self.updated_at = now
        self.value += (number - self.value) * weight / self._weight


class FadingShare:
    """The share of one count of a worker in another, of late. Both count from the worker's start.

    Args:
        memory_s: as in `FadingMean`.
    """

    def __init__(self, memory_s: float) -> None:
        self._mean = FadingMean(memory_s)
        self._last = (0, 0)

    def add(self, part: int, whole: int, now: float) -> float:
        """Takes the counts of now; returns the share. It stays as it was while nothing counts."""
        new_part, new_whole = part - self._last[0], whole - self._last[1]
        if new_whole > 0:
            self._mean.add(new_part / new_whole, now, new_whole)
            self._last = part, whole
        return self._mean.value


class FadingSum:
    """How much a count of a worker has grown since this router heard of it, where recent growth
    weighs more. What the worker did before may be of hours, and says nothing of late.

    Args:
        memory_s: as in `FadingMean`.

    Attributes:
        order: the sum's logarithm, plus what every sum fades by until it is read. So the orders of
            several sums compare as the sums do, whenever each was changed.
    """

    def __init__(self, memory_s: float) -> None:
        self.order = -math.inf
        self._memory_s = memory_s
        self._last: int | None = None

    def add(self, count: int, now: float) -> None:
        """Takes the count of now. A lower one is late: a worker of both roles sends two reports."""
        growth = 0 if self._last is None else count - self._last
        if growth >= 0:
            self._last = count
        if growth > 0:
            added = math.log(growth) + now / self._memory_s
            low, high = sorted((self.order, added))
            self.order = high + math.log1p(math.exp(low - high))
