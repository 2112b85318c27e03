"""`LoadCosts`: whether KV is loaded sooner than it is computed. Pure.

What a load will take is told by those before it: so much per load and so much
per token, the straight line that fits best (least squares, where a load counts
less with each that ends after it). A load is given up before it begins, or
while it runs, where computing is clearly cheaper. So that a store which has
recovered is seen, one load in a while is tried nevertheless; if that is worth
it, what was before is forgotten.
"""

import math
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.runner import StepCosts

__all__ = ["LoadCosts"]

# Loads as quick as this are taken, however quick computing is: it leaves steps to others.
_ALWAYS_WORTH_S = 0.05
# A load that runs is worth waiting for until it has taken so much longer than computing ...
_PATIENCE_FACTOR = 3.0
# ... and so long at all: threads may be late by that on a busy machine.
_MIN_PATIENCE_S = 0.25
# After as many seconds without a load one is tried.
_PROBE_INTERVAL_S = 5.0
# So many loads are seen before one is judged: the first ones connect, and warm caches.
_MIN_LOADS = 4
# What is left of a load's weight when another has ended.
_KEPT_WEIGHT = 0.8


class LoadCosts:
    """Running estimates of one connector's loads. Times are seconds of one clock.

    Args:
        prompt_token_s: seconds to compute one more token of a prompt; infinite where
            nothing is to be computed that could be loaded.
    """

    def __init__(self, prompt_token_s: float) -> None:
        self._prompt_token_s = prompt_token_s
        self._line = _Line()
        self._num_seen = 0
        self._running: dict[int, _Running] = {}
        self._last_start = -math.inf
        self._last_end = -math.inf

    @classmethod
    def of(cls, config: EngineConfig, costs: StepCosts) -> "LoadCosts":
        """Those of an engine. By policy it computes nothing that a load was to bring."""
        may_compute = config.kv_load_failure_policy == "recompute"
        return cls(costs.prompt_token_s if may_compute else math.inf)

    def may_load(self, num_tokens: int, num_queued_tokens: int, now: float) -> bool:
        """Whether so many tokens' KV is sooner loaded than computed, or a load is to be tried.

        Args:
            num_tokens: to load, or else to compute; one or more.
            num_queued_tokens: others that would be computed before them.
            now: the time.
        """
        is_due = now - self._last_start >= _PROBE_INTERVAL_S
        return is_due or self._is_worth(num_tokens, self._compute_s(num_tokens, num_queued_tokens))

    def predict_s(self, num_tokens: int) -> float:
        """Seconds that a load of so many tokens would take now, behind those that run."""
        ahead = sum(self._line.at(load.num_tokens) for load in self._running.values())
        return ahead + self._line.at(num_tokens)

    # Loads that run.

    def start(self, job_id: int, num_tokens: int, num_queued_tokens: int, now: float) -> None:
        """A load begins, for which nobody waits yet; as in `may_load`."""
        compute_s = self._compute_s(num_tokens, num_queued_tokens)
        is_probe = not self._is_worth(num_tokens, compute_s)
        self._running[job_id] = _Running(num_tokens, now, compute_s, is_probe)
        self._last_start = now

    def wait(self, job_id: int, now: float) -> None:
        """A request waits for a load from now on. Unknown ids are fine."""
        if (load := self._running.get(job_id)) is not None:
            load.give_up_at = now + max(_MIN_PATIENCE_S, _PATIENCE_FACTOR * load.compute_s)

    def end(self, job_id: int, now: float, seconds: float = 0.0) -> None:
        """All that a load asked for has come. Unknown ids are fine.

        Args:
            job_id: as given to `start`.
            now: the time.
            seconds: what it took; 0 if it is over only now.
        """
        if (load := self._running.pop(job_id, None)) is None:
            return
        ended_at = load.started_at + seconds if seconds else now
        # Loads share what moves them: one that waited for another took only what came after.
        load_s = ended_at - max(load.started_at, min(self._last_end, ended_at))
        if load.is_probe and load_s <= max(_ALWAYS_WORTH_S, load.compute_s):
            self._line = _Line()
        self._last_end = max(self._last_end, ended_at)
        self._learn(load, load_s)

    def drop(self, job_id: int) -> None:
        """A load has ended in a way that tells nothing of its costs. Unknown ids are fine."""
        self._running.pop(job_id, None)

    @property
    def next_give_up(self) -> float | None:
        """When `give_up` is next due."""
        earliest = min((load.give_up_at for load in self._running.values()), default=math.inf)
        return earliest if earliest < math.inf else None

    def give_up(self, now: float) -> list[int]:
        """Loads that have been waited for too long: they take so long, at least."""
        overdue = [job_id for job_id, load in self._running.items() if load.give_up_at <= now]
        for job_id in overdue:
            # All of the time counts: nobody knows of a load before it that it waited for.
            load = self._running.pop(job_id)
            self._learn(load, now - load.started_at)
        return overdue

    def _learn(self, load: "_Running", load_s: float) -> None:
        self._line.add(load.num_tokens, load_s)
        self._num_seen += 1

    def _compute_s(self, num_tokens: int, num_queued_tokens: int) -> float:
        return (num_tokens + num_queued_tokens) * self._prompt_token_s

    def _is_worth(self, num_tokens: int, compute_s: float) -> bool:
        if self._num_seen < _MIN_LOADS:
            return True
        return self.predict_s(num_tokens) <= max(_ALWAYS_WORTH_S, compute_s)


@dataclass(slots=True)
class _Running:
    num_tokens: int
    started_at: float
    compute_s: float
    is_probe: bool
    give_up_at: float = math.inf


@dataclass(slots=True)
class _Line:
    """The line that fits weighted points best: sums of weights, x, y, x² and xy."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Adds a point; those before it count less."""
        self.weight = self.weight * _KEPT_WEIGHT + 1
        self.x = self.x * _KEPT_WEIGHT + x
        self.y = self.y * _KEPT_WEIGHT + y
        self.xx = self.xx * _KEPT_WEIGHT + x * x
        self.xy = self.xy * _KEPT_WEIGHT + x * y

    def at(self, x: float) -> float:
        """The line's height, which neither starts below zero nor falls; 0 without points.

        Where all points have one x, it is the line through zero.
        """
        if not self.weight:
            return 0.0
        spread = self.weight * self.xx - self.x * self.x
        if spread <= 1e-9 * self.weight * self.xx:
            return x * self.y / self.x
        slope = max(0.0, (self.weight * self.xy - self.x * self.y) / spread)
        start = (self.y - slope * self.x) / self.weight
        return start + slope * x if start > 0 else x * self.xy / self.xx
