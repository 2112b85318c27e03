"""The search of `baton tune` for the highest goodput: generators of measurements. Pure.

A search yields the next `Trial` and receives its goodput. So it runs on real clusters, and in tests
on a formula.

A candidate's goodput rises with the request rate as long as the service level is met, and falls
when queues grow. `climb` doubles or halves the rate until the peak lies between two rates, then
bisects the wider gap beside it. `coordinate_search` starts from the defaults and moves along one
axis at a time as long as goodput rises.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.tune.candidate import Axis, Candidate

__all__ = ["SearchSettings", "Trial", "climb", "coordinate_search"]


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


Curve = dict[float, float]
"""Goodput by request rate."""
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
