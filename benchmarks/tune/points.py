"""What `baton tune` measured: points, and what they say of each candidate. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.metrics import Metrics
from benchmarks.tune.candidate import Candidate

__all__ = ["Point", "best_points", "curve_of"]


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate under a load.

    Attributes:
        candidate: the flags.
        request_rate: requests per second that were sent.
        goodput: good requests per second.
        share: of the requests that were good.
        ttft_p90_ms: of the requests that succeeded; None if none did.
        tpot_p90_ms: the same.
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
    def of(cls, candidate: Candidate, request_rate: float, metrics: Metrics) -> "Point":
        """From the metrics of a run with a service level."""
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
        """Of a candidate that does not work."""
        return cls(candidate, request_rate, 0.0, 0.0, None, None, 0)


def best_points(points: Sequence[Point]) -> list[Point]:
    """Each candidate's point of the highest goodput, the best candidate first.

    Of equal points the one measured first counts.
    """
    best: dict[Candidate, Point] = {}
    for point in points:
        if point.candidate not in best or point.goodput > best[point.candidate].goodput:
            best[point.candidate] = point
    return sorted(best.values(), key=lambda point: -point.goodput)


def curve_of(points: Sequence[Point], candidate: Candidate) -> list[Point]:
    """A candidate's points by request rate."""
    own = (point for point in points if point.candidate == candidate)
    return sorted(own, key=lambda point: point.request_rate)
