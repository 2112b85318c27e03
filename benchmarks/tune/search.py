"""How `baton tune` looks for the highest goodput. Pure: generators that ask for measurements.

A search yields the next `Trial` and is sent the goodput that it had. So it runs
against real clusters and, in tests, against a formula alike.

For one candidate, goodput rises with the request rate as long as the service
level holds, and falls when queues grow. `climb` doubles or halves the rate
until the peak lies between two rates, then bisects the wider of the two gaps
beside it. `coordinate_search` starts from the defaults and moves along one axis
at a time for as long as that helps.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.tune.candidate import Axis, Candidate

__all__ = ["SearchSettings", "Trial", "climb", "coordinate_search"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A measurement to make: a candidate under so many requests per second."""

    candidate: Candidate
    request_rate: float


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How closely to look.

    Attributes:
        start_rate: requests per second to begin with.
        resolution: stop bisecting where neighbouring rates are within this factor.
        least_gain: a candidate must be better by this factor to take over.
        hopeless: a candidate whose first goodput, at the best one's rate, is below this
            share of the best is left at once.
        max_doublings: the most times the rate is doubled, or halved, in a row.
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
    """Finds the rate of the highest goodput; returns all that was measured.

    Args:
        candidate: what to measure.
        start_rate: requests per second to begin with.
        settings: how closely to look.
        at_least: a candidate whose first goodput is below it is left at once.
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
    """Tries the neighbours of the best candidate, axis by axis, until none is better;
    returns the best.
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
    """Goes along an axis for as long as each step is better than the one before."""
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
    """Measures until the peak has a lower neighbour on both sides, or the doublings are spent."""
    for factor in (2.0, 0.5):
        for _ in range(settings.max_doublings):
            edge = max(curve) if factor > 1 else min(curve)
            # Where nothing is good yet, only slower can be.
            is_rising = curve[edge] == _peak(curve) and (factor < 1 or curve[edge] > 0)
            if not is_rising:
                break
            curve[edge * factor] = yield Trial(candidate, edge * factor)


def _next_rate(curve: Curve, resolution: float) -> float | None:
    """The middle of the wider gap beside the peak; None where both are narrow enough."""
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
    """Of equal goodputs, that of the lowest rate."""
    return min(rate for rate, goodput in curve.items() if goodput == _peak(curve))
