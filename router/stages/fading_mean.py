"""`FadingMean`: the mean of what was measured last. Pure."""

import math

__all__ = ["MEMORY_S", "FadingMean"]

MEMORY_S = 2.0
"""How long a number counts: its weight falls to 1/e in this time."""


class FadingMean:
    """The mean of numbers that weigh less the older they are.

    Attributes:
        value: the mean; 0 without numbers.
        updated_at: when the last number came.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.updated_at = 0.0
        self._weight = 0.0

    def add(self, number: float, now: float) -> None:
        """Takes a number."""
        self._weight = self._weight * math.exp((self.updated_at - now) / MEMORY_S) + 1.0
        self.updated_at = now
        self.value += (number - self.value) / self._weight
