"""The search of `baton tune` for the highest goodput: generators of measurements. Pure.

A search yields the next `Trial` and receives its goodput. So it runs on real clusters, and in tests
on a formula.

A candidate's goodput rises with the request rate as long as the service level is met, and falls
when queues grow. `climb` doubles or halves the rate until the peak lies between two rates, then
bisects the wider gap beside it. `coordinate_search` starts from the defaults and moves along one
axis at a time as long as goodput rises.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.metrics import LoadMetrics

__all__ = [
    "AXES",
    "Axis",
    "Candidate",
    "Point",
    "SearchSettings",
    "Trial",
    "best_points",
    "climb",
    "coordinate_search",
    "curve_of",
]

_MIN_SEQS, _MAX_SEQS = 1, 4096
_MIN_TOKENS, _MAX_TOKENS = 64, 1 << 17
Curve = dict[float, float]
"""Goodput by request rate."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Flags of `baton serve`.

    Attributes:
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step.
        long_prefill_token_threshold: most tokens of one prompt in one step; None for all.
        num_prefill: prefill workers; with 0, decode workers compute prompts.
        num_decode: decode workers.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int | None
    num_prefill: int
    num_decode: int

    def __str__(self) -> str:
        return (
            f"{self.num_prefill}:{self.num_decode}, seqs {self.max_num_seqs}, tokens "
            f"{self.max_num_batched_tokens}, chunk {self.long_prefill_token_threshold or 'any'}"
        )


Axis = Callable[[Candidate, int], Candidate | None]
"""Returns the neighbour one step up (+1) or down (-1); None at the end of the axis."""


def _step_seqs(candidate: Candidate, direction: int) -> Candidate | None:
    seqs = _scaled(candidate.max_num_seqs, direction)
    is_useful = _MIN_SEQS <= seqs <= min(_MAX_SEQS, candidate.max_num_batched_tokens)
    return replace(candidate, max_num_seqs=seqs) if is_useful else None


def _step_tokens(candidate: Candidate, direction: int) -> Candidate | None:
    tokens = _scaled(candidate.max_num_batched_tokens, direction)
    threshold = candidate.long_prefill_token_threshold
    is_useful = max(_MIN_TOKENS, candidate.max_num_seqs, (threshold or 0) + 1) <= tokens
    if not is_useful or tokens > _MAX_TOKENS:
        return None
    return replace(candidate, max_num_batched_tokens=tokens)


def _step_threshold(candidate: Candidate, direction: int) -> Candidate | None:
    """Steps over powers of two below the step's budget; the highest value is no threshold."""
    budget, now = candidate.max_num_batched_tokens, candidate.long_prefill_token_threshold
    if now is None and direction > 0:
        return None
    threshold: int | None = _scaled(budget if now is None else now, direction)
    assert threshold is not None
    if threshold < _MIN_TOKENS:
        return None
    if threshold >= budget:
        threshold = None
    return replace(candidate, long_prefill_token_threshold=threshold)


def _step_ratio(candidate: Candidate, direction: int) -> Candidate | None:
    """Moves one worker from a tier to the other."""
    prefill, decode = candidate.num_prefill + direction, candidate.num_decode - direction
    if prefill < 0 or decode < 1:
        return None
    return replace(candidate, num_prefill=prefill, num_decode=decode)


def _scaled(value: int, direction: int) -> int:
    return value * 2 if direction > 0 else value // 2


AXES: tuple[Axis, ...] = (_step_ratio, _step_seqs, _step_tokens, _step_threshold)


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of a candidate at one request rate.

    Attributes:
        candidate: the flags.
        request_rate: requests sent per second.
        goodput: good requests per second.
        share: share of the requests that were good.
        ttft_p90_ms: 90th percentile of the TTFT of requests that succeeded; None without any.
        tpot_p90_ms: 90th percentile of their TPOT; None without any.
        num_failed: requests that failed.
    """

    candidate: Candidate
    request_rate: float
    goodput: float
    share: float
    ttft_p90_ms: float | None
    tpot_p90_ms: float | None
    num_failed: int

    @classmethod
    def of(cls, candidate: Candidate, request_rate: float, metrics: LoadMetrics) -> "Point":
        """Returns the point of a run with a service level."""
        assert metrics.goodput is not None
        return cls(
            candidate=candidate,
            request_rate=request_rate,
            goodput=metrics.goodput.requests_per_s,
            share=metrics.goodput.share,
            ttft_p90_ms=metrics.ttft_ms.p90 if metrics.ttft_ms else None,
            tpot_p90_ms=metrics.tpot_ms.p90 if metrics.tpot_ms else None,
            num_failed=metrics.num_failed,
        )

    @classmethod
    def without_goodput(cls, candidate: Candidate, request_rate: float) -> "Point":
        """Returns the point of a candidate that fails."""
        return cls(candidate, request_rate, 0.0, 0.0, None, None, 0)


def best_points(points: Sequence[Point]) -> list[Point]:
    """Returns each candidate's point with the highest goodput, the best candidate first.

    Among equal points, the one measured first counts.
    """
    best: dict[Candidate, Point] = {}
    for point in points:
        if point.candidate not in best or point.goodput > best[point.candidate].goodput:
            best[point.candidate] = point
    return sorted(best.values(), key=lambda point: -point.goodput)


def curve_of(points: Sequence[Point], candidate: Candidate) -> list[Point]:
    """Returns a candidate's points, ordered by request rate."""
    own = (point for point in points if point.candidate == candidate)
    return sorted(own, key=lambda point: point.request_rate)


@dataclass(frozen=True, slots=True)
class Trial:
    """A measurement to make: a candidate at a rate of requests per second."""

    candidate: Candidate
    request_rate: float


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Settings of a search.

    Attributes:
        start_rate: the first request rate, per second.
        resolution: bisection stops when neighbouring rates are within this factor.
        least_gain: a candidate must be better by this factor to become the best one.
        hopeless: a candidate is dropped if its first goodput, at the best one's rate, is below
            this share of the best.
        max_doublings: how often in a row the rate may be doubled or halved.
    """

    start_rate: float
    resolution: float = 1.25
    least_gain: float = 1.03
    hopeless: float = 0.9
    max_doublings: int = 10


Climb = Generator[Trial, float, Curve]


def climb(
    candidate: Candidate, start_rate: float, settings: SearchSettings, at_least: float = 0.0
) -> Climb:
    """Finds the rate of the highest goodput; returns all measurements.

    Args:
        candidate: the candidate to measure.
        start_rate: the first request rate, per second.
        settings: the settings of the search.
        at_least: the candidate is dropped if its first goodput is lower.
    """
    curve = {start_rate: (yield Trial(candidate, start_rate))}
    if curve[start_rate] < at_least:
        return curve
    yield from _widen(candidate, curve, settings)
    while (rate := _next_rate(curve, settings.resolution)) is not None:
        curve[rate] = yield Trial(candidate, rate)
    return curve


def coordinate_search(
    start: Candidate, axes: Sequence[Axis], settings: SearchSettings
) -> Generator[Trial, float, Candidate]:
    """Tries the neighbours of the best candidate, axis by axis, until none is better.

    Returns:
        The best candidate.
    """
    best = _Best(start, (yield from climb(start, settings.start_rate, settings)))
    tried = {start}
    before = None
    while before is not best.candidate:
        before = best.candidate
        for axis in axes:
            for direction in (-1, 1):
                best = yield from _walk(best, axis, direction, tried, settings)
    return best.candidate


@dataclass(frozen=True, slots=True)
class _Best:
    candidate: Candidate
    curve: Curve


def _walk(
    best: _Best, axis: Axis, direction: int, tried: set[Candidate], settings: SearchSettings
) -> Generator[Trial, float, _Best]:
    """Moves along an axis as long as each step is better than the one before."""
    while True:
        candidate = axis(best.candidate, direction)
        if candidate is None or candidate in tried:
            return best
        tried.add(candidate)
        peak = _peak(best.curve)
        rate = _peak_rate(best.curve) if peak > 0 else settings.start_rate
        curve = yield from climb(candidate, rate, settings, settings.hopeless * peak)
        if _peak(curve) <= settings.least_gain * peak:
            return best
        best = _Best(candidate, curve)


def _widen(
    candidate: Candidate, curve: Curve, settings: SearchSettings
) -> Generator[Trial, float, None]:
    """Measures until goodput is lower on both sides of the peak, or the doublings are used up."""
    for factor in (2.0, 0.5):
        for _ in range(settings.max_doublings):
            edge = max(curve) if factor > 1 else min(curve)
            # Without any goodput so far, only a lower rate can have some.
            is_rising = curve[edge] == _peak(curve) and (factor < 1 or curve[edge] > 0)
            if not is_rising:
                break
            curve[edge * factor] = yield Trial(candidate, edge * factor)


def _next_rate(curve: Curve, resolution: float) -> float | None:
    """Returns the middle of the wider gap beside the peak; None if both are narrow enough."""
    if _peak(curve) <= 0:
        return None
    rates = sorted(curve)
    index = rates.index(_peak_rate(curve))
    around = rates[max(0, index - 1) : index + 2]
    gaps = [(high / low, low, high) for low, high in pairwise(around)]
    width, low, high = max(gaps, default=(1.0, 0.0, 0.0))
    return math.sqrt(low * high) if width > resolution else None


def _peak(curve: Curve) -> float:
    return max(curve.values())


def _peak_rate(curve: Curve) -> float:
    """Returns the rate of the highest goodput, the lowest such rate."""
    return min(rate for rate, goodput in curve.items() if goodput == _peak(curve))
