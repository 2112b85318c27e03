"""`LoadCosts`: estimates whether loading KV is faster than computing it. Pure.

A load's time is predicted from the loads before it, as a fixed part plus a part per token: the
line that fits best by least squares, where recent loads weigh more. A load is not started, or not
waited for any longer, if computing is clearly cheaper. Now and then a load is started all the
same, so that the engine notices when a slow store has recovered. If that load is fast, the
estimates start afresh.
"""

import math
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.runner import StepCosts

__all__ = ["MAX_SILENCE_S", "LoadCosts", "LoadEstimate"]

# Loads that take at most this long are always worth it: they leave the step to other requests.
_ALWAYS_WORTH_S = 0.05
# A request waits for its load at most this many times as long as computing would take ...
_PATIENCE_FACTOR = 3.0
# ... but at least this long, as threads may be that late on a busy machine.
_MIN_PATIENCE_S = 0.25
# A load is started regardless of its costs if none was started for this long.
_PROBE_INTERVAL_S = 5.0
# Loads are not judged before this many have ended: the first ones connect and warm up caches.
_MIN_LOADS = 4
# Loads say nothing of a store's speed any more when they ended this long ago.
MAX_SILENCE_S = 60.0
# Each load that ends multiplies the weight of those before it by this.
_KEPT_WEIGHT = 0.8


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """A running load, as `LoadCosts.start` has recorded it.

    Attributes:
        num_tokens: tokens to load.
        started_at: clock time.
        compute_s: seconds that computing them would take instead.
        is_probe: whether it was started although it did not seem worth it.
    """

    num_tokens: int
    started_at: float
    compute_s: float
    is_probe: bool

    @property
    def patience_s(self) -> float:
        """Seconds that a request should wait for it at most."""
        return max(_MIN_PATIENCE_S, _PATIENCE_FACTOR * self.compute_s)


class LoadCosts:
    """Running estimates of one connector's loads. All times are seconds of one clock.

    Each estimate that `start` returns must be passed once to `end`, `give_up` or `drop`.

    Args:
        prompt_token_s: seconds to compute one more token of a prompt; infinite if the engine
            must never compute what it can load.
    """

    def __init__(self, prompt_token_s: float) -> None:
        self._prompt_token_s = prompt_token_s
        self._line = _Line()
        self._num_seen = 0
        self._num_running = 0
        self._num_running_tokens = 0
        self._last_start = -math.inf
        self._last_end = -math.inf
        self._learned_at = -math.inf

    @classmethod
    def of(cls, config: EngineConfig, costs: StepCosts) -> "LoadCosts":
        """Returns the estimates for an engine, which must not compute if its policy is "fail"."""
        may_compute = config.kv_load_failure_policy == "recompute"
        return cls(costs.prompt_token_s if may_compute else math.inf)

    def may_load(self, num_tokens: int, num_queued_tokens: int, now: float) -> bool:
        """Returns whether to load tokens' KV: it is faster, or a probe is due.

        Args:
            num_tokens: tokens to load or to compute; at least one.
            num_queued_tokens: other tokens that would be computed before them.
            now: the time.
        """
        is_due = now - self._last_start >= _PROBE_INTERVAL_S
        return is_due or self._is_worth(num_tokens, self._compute_s(num_tokens, num_queued_tokens))

    def predict_s(self, num_tokens: int) -> float:
        """Predicts the seconds of a load that starts now, behind the running loads."""
        ahead = self._line.sum_at(self._num_running, self._num_running_tokens)
        return ahead + self._line.sum_at(1, num_tokens)

    def tokens_per_s(self, now: float) -> float:
        """Returns how many tokens' KV loads have brought per second of their own; 0 unless some
        ended in the last minute. Routers would never try again a store that was slow once, if its
        speed then counted forever.
        """
        has_news = now - self._learned_at <= MAX_SILENCE_S
        return self._line.x / self._line.y if has_news and self._line.y > 0 else 0.0

    # Loads that run.

    def start(self, num_tokens: int, num_queued_tokens: int, now: float) -> LoadEstimate:
        """Records the start of a load; the arguments are those of `may_load`."""
        compute_s = self._compute_s(num_tokens, num_queued_tokens)
        is_probe = not self._is_worth(num_tokens, compute_s)
        self._num_running += 1
        self._num_running_tokens += num_tokens
        self._last_start = now
        return LoadEstimate(num_tokens, now, compute_s, is_probe)

    def end(self, load: LoadEstimate, now: float, seconds: float = 0.0) -> None:
        """Updates the estimates with a load that brought all it was asked for.

        Args:
            load: from `start`.
            now: the time.
            seconds: how long the load took; 0 if it has ended only now.
        """
        self._leave_out(load)
        ended_at = load.started_at + seconds if seconds else now
        # Loads share threads and links: the time that one waited for another is not its own.
        load_s = ended_at - max(load.started_at, min(self._last_end, ended_at))
        if load.is_probe and load_s <= max(_ALWAYS_WORTH_S, load.compute_s):
            self._line = _Line()
        self._last_end = max(self._last_end, ended_at)
        self._learn(load, load_s, now)

    def give_up(self, load: LoadEstimate, now: float) -> None:
        """Updates the estimates with a load that still runs but is not waited for any more."""
        self._leave_out(load)
        # All of its time counts, as no other load is known to have delayed it.
        self._learn(load, now - load.started_at, now)

    def drop(self, load: LoadEstimate) -> None:
        """Forgets a load whose end says nothing about costs, such as a failure.

        If it was a probe and no other load runs, the next load may be a probe at once.
        """
        self._leave_out(load)
        if load.is_probe and not self._num_running:
            self._last_start = -math.inf

    def _leave_out(self, load: LoadEstimate) -> None:
        """Takes a load out of those that run."""
        self._num_running -= 1
        self._num_running_tokens -= load.num_tokens

    def _learn(self, load: LoadEstimate, load_s: float, now: float) -> None:
        self._learned_at = now
        self._line.add(load.num_tokens, load_s)
        self._num_seen += 1

    def _compute_s(self, num_tokens: int, num_queued_tokens: int) -> float:
        return (num_tokens + num_queued_tokens) * self._prompt_token_s

    def _is_worth(self, num_tokens: int, compute_s: float) -> bool:
        if self._num_seen < _MIN_LOADS:
            return True
        return self.predict_s(num_tokens) <= max(_ALWAYS_WORTH_S, compute_s)


@dataclass(slots=True)
class _Line:
    """The line that fits weighted points best: sums of weights, x, y, x² and xy."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Adds a point; the points before it lose weight."""
        self.weight = self.weight * _KEPT_WEIGHT + 1
        self.x = self.x * _KEPT_WEIGHT + x
        self.y = self.y * _KEPT_WEIGHT + y
        self.xx = self.xx * _KEPT_WEIGHT + x * x
        self.xy = self.xy * _KEPT_WEIGHT + x * y

    def sum_at(self, count: int, x: float) -> float:
        """Returns the sum of the line's heights at `count` places that add up to `x`.

        The line has no negative height at 0 and does not fall. If all points have the same x, it
        goes through the origin. Without points it is 0.
        """
        if not self.weight:
            return 0.0
        spread = self.weight * self.xx - self.x * self.x
        if spread <= 1e-9 * self.weight * self.xx:
            return x * self.y / self.x
        slope = max(0.0, (self.weight * self.xy - self.x * self.y) / spread)
        start = (self.y - slope * self.x) / self.weight
        return count * start + slope * x if start > 0 else x * self.xy / self.xx
