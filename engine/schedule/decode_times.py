"""`DecodeTimes`: how long steps take that only decode, by their number of tokens. Pure.

A step of n tokens takes about `fixed_s + n * token_s`. The line goes through the mean of recent
steps, so that it is right at their size, whatever else changes. Its slope is that of least squares
through the means of steps of similar sizes: the time of a token shows when steps have other sizes,
and must not be forgotten while all have the same. Until sizes differ, it is an estimate, from which
the few first steps of a size change it little: they are recorded, or disturbed.
"""

from dataclasses import dataclass

__all__ = ["MAX_RATIO", "MEAN_RATE", "DecodeTimes"]

MEAN_RATE = 0.2
"""The weight of a step in a mean."""
MAX_RATIO = 2.0
"""A step counts up to this multiple of its expected time: it may have been disturbed."""
_SPREAD = 64.0
"""The weight of the estimate, as a sum of squares of sizes' distances from their mean."""
_FULL_COUNT = 16
"""The number of steps from which on their mean has its full weight."""
_MIN_S = 1e-9


@dataclass(slots=True)
class _Mean:
    """The mean of steps, in which recent ones count most.

    Attributes:
        num_tokens: mean of their tokens.
        seconds: mean of their times.
        count: their number.
    """

    num_tokens: float
    seconds: float
    count: int = 1

    def add(self, num_tokens: int, seconds: float) -> None:
        """Adds a step."""
        self.count += 1
        self.num_tokens += MEAN_RATE * (num_tokens - self.num_tokens)
        self.seconds += MEAN_RATE * (seconds - self.seconds)


class DecodeTimes:
    """The times of one engine's steps that only decode.

    Args:
        token_s: estimate of the seconds of a token.

    Attributes:
        fixed_s: seconds of a step besides its tokens; 0 until a step was measured.
        token_s: seconds of a token.
    """

    def __init__(self, token_s: float) -> None:
        self.fixed_s = 0.0
        self.token_s = token_s
        self._expected_token_s = token_s
        self._recent: _Mean | None = None
        self._by_size: dict[int, _Mean] = {}  # by the number of bits of a step's tokens

    def step_s(self, num_tokens: int) -> float:
        """Returns the seconds of a step."""
        return self.fixed_s + num_tokens * self.token_s

    def expect(self, token_s: float) -> None:
        """Changes the estimate of a token's seconds."""
        self._expected_token_s = token_s
        self._fit()

    def record(self, num_tokens: int, seconds: float) -> None:
        """Adds a step of at least one token that was measured."""
        seconds = max(_MIN_S, seconds)
        if self._recent is None:
            self._recent = _Mean(num_tokens, seconds)
        else:
            seconds = min(seconds, MAX_RATIO * self.step_s(num_tokens))
            self._recent.add(num_tokens, seconds)
        size = num_tokens.bit_length()
        if size in self._by_size:
            self._by_size[size].add(num_tokens, seconds)
        else:
            self._by_size[size] = _Mean(num_tokens, seconds)
        self._fit()

    def _fit(self) -> None:
        """Lays the line through the recent mean; neither of its two numbers is less than 0."""
        recent = self._recent
        if recent is None:
            self.token_s = self._expected_token_s
            return
        self.token_s = min(max(self._slope_s(), 0.0), recent.seconds / recent.num_tokens)
        self.fixed_s = max(0.0, recent.seconds - recent.num_tokens * self.token_s)

    def _slope_s(self) -> float:
        """Returns the seconds of a token by least squares."""
        means = self._by_size.values()
        weights = [min(1.0, mean.count / _FULL_COUNT) for mean in means]
        pairs = list(zip(weights, means, strict=True))
        mean_tokens = sum(weight * mean.num_tokens for weight, mean in pairs) / sum(weights)
        mean_s = sum(weight * mean.seconds for weight, mean in pairs) / sum(weights)
        spread, rise = _SPREAD, _SPREAD * self._expected_token_s
        for weight, mean in pairs:
            distance = weight * (mean.num_tokens - mean_tokens)
            spread += distance * (mean.num_tokens - mean_tokens)
            rise += distance * (mean.seconds - mean_s)
        return rise / spread
