"""The measurements of `baton tune`: points, and their order by candidate. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.metrics import LoadMetrics
from benchmarks.tune.candidate import Candidate

__all__ = ["Point", "best_points", "curve_of"]


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
