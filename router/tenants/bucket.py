"""`TokenBucket`: how much may be used per minute."""

__all__ = ["TokenBucket"]

_MINUTE_S = 60.0


class TokenBucket:
    """Fills by `per_minute` a minute, up to that number.

    Its level may be negative: what was used in excess must flow in again before the next use.

    Args:
        per_minute: how much flows in, and the most that it holds.
        now: the present time in seconds, on the clock of all later calls.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until the bucket holds `amount`, or is full if that is less; 0 if it does."""
        self._fill(now)
        lacking = min(amount, self.per_minute) - self._level
        return max(lacking, 0.0) * _MINUTE_S / self.per_minute

    def take(self, amount: int, now: float) -> None:
        """Takes an amount, whatever the bucket holds."""
        self._fill(now)
        self._level -= amount

    def give_back(self, amount: int) -> None:
        """Puts an amount back that was taken and not used."""
        self._level += amount

    def set_rate(self, per_minute: int, now: float) -> None:
        """Changes what flows in from now on; what the bucket holds stays, if it fits."""
        self._fill(now)
        self.per_minute = per_minute
        self._level = min(self._level, per_minute)

    def is_full(self, now: float) -> bool:
        """Whether the bucket is as it was when it was new."""
        return self.wait_s(self.per_minute, now) == 0

    def _fill(self, now: float) -> None:
        elapsed_s = max(now - self._filled_at, 0.0)
        self._filled_at = max(now, self._filled_at)
        gained = elapsed_s * self.per_minute / _MINUTE_S
        self._level = min(self._level + gained, self.per_minute)
