"""`TokenBucket`: what a rate per minute has left."""

from array import array

__all__ = ["TokenBucket"]

_MINUTE_S = 60.0
_ROUNDING_S = 1e-6
"""A shorter wait is an error of rounding."""


class TokenBucket:
    """Fills by `per_minute` a minute, up to that number.

    Its level may be negative: what was used in excess must flow in again before the next use.

    Args:
        per_minute: how much flows in, and the most that it holds.
        now: the present time in seconds, on the clock of all later calls.
        cells: the two numbers of the bucket, which may be those of an earlier object: its rate, and
            the time at which it will be full. Zeros are a bucket that is full. If the rate was
            another one, what the bucket holds stays, if it fits. None for numbers of its own.
    """

    def __init__(
        self, per_minute: int, now: float, cells: "memoryview[float] | None" = None
    ) -> None:
        self.per_minute = per_minute
        if cells is None:
            cells = memoryview(array("d", (0.0, 0.0)))
        self._cells: memoryview[float] = cells
        earlier_rate, full_at = self._cells
        if earlier_rate != per_minute:
            lacking_s = max(full_at - now, 0.0)
            level = earlier_rate * (1 - lacking_s / _MINUTE_S) if earlier_rate else per_minute
            self._cells[0] = per_minute
            self._cells[1] = now + self._seconds(per_minute - min(level, per_minute))

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until the bucket holds `amount`, or is full if that is less; 0 if it does."""
        spare_s = _MINUTE_S - self._seconds(min(amount, self.per_minute))
        wait_s = self._cells[1] - now - spare_s
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def take(self, amount: int, now: float) -> None:
        """Takes an amount, whatever the bucket holds."""
        self._cells[1] = max(self._cells[1], now) + self._seconds(amount)

    def give_back(self, amount: int) -> None:
        """Puts an amount back that was taken and not used."""
        self._cells[1] -= self._seconds(amount)

    def _seconds(self, amount: float) -> float:
        """How long an amount takes to flow in."""
        return amount * _MINUTE_S / self.per_minute
