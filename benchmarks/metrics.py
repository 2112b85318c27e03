"""Computes latencies, throughput, goodput and concurrency from a run's records. Pure.

Definitions (docs/benchmarks.md has them for readers):

    TTFT  from sending a request to its first token
    ITL   from each token to the next of its request; 0 between tokens of one message
    TPOT  per request of two tokens or more: (last token - first token) / (tokens - 1)
    E2E   from sending a request to its last message
    duration     from the first request sent to the last one ended
    concurrency  sum of the times from sent to ended, of all requests, over the duration

Latencies and throughput count requests that succeeded. Failed requests are counted, and never meet
a service level.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from baton.common.errors import ConfigurationError
from benchmarks.request import MeasuredRequest

__all__ = [
    "Distribution",
    "Goodput",
    "LoadMetrics",
    "ServiceLevel",
    "add_goodput_arg",
    "compute_metrics",
    "distribution_of",
    "first_tokens_ms",
    "latencies_ms",
    "parse_service_level",
    "peak_concurrency",
    "token_gaps_ms",
    "tokens_per_output_ms",
]

_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Limits of latencies in milliseconds; None sets no limit.

    Attributes:
        ttft_ms: time to the first token.
        tpot_ms: mean time per token after the first; a request of one token keeps it.
        e2el_ms: time to the last token.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def is_met(self, record: MeasuredRequest) -> bool:
        """Returns whether a request succeeded within all limits."""
        if record.error is not None:
            return False
        figures = (
            (self.ttft_ms, record.first_token_s),
            (self.tpot_ms, record.token_gap_s),
            (self.e2el_ms, record.latency_s),
        )
        return all(
            limit_ms is None or seconds is None or 1000 * seconds <= limit_ms
            for limit_ms, seconds in figures
        )

    def __str__(self) -> str:
        limits = ((name, getattr(self, f"{name}_ms")) for name in _NAMES)
        return " ".join(f"{name}:{limit:g}" for name, limit in limits if limit is not None)


def parse_service_level(texts: Sequence[str]) -> ServiceLevel:
    """Reads `NAME:MS` pairs.

    Raises:
        ConfigurationError: a pair is malformed, or names no latency.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in _NAMES:
            raise ConfigurationError(
                f"--goodput has {text!r}; it must be of {', '.join(f'{n}:MS' for n in _NAMES)}"
            )
        limits[f"{name}_ms"] = _milliseconds(text, limit)
    return ServiceLevel(**limits)


def _milliseconds(text: str, limit: str) -> float:
    try:
        value = float(limit)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"--goodput has {text!r}; its limit must be a number > 0, in ms")
    return value


def add_goodput_arg(group: argparse._ActionsContainer, *, is_required: bool = False) -> None:
    """Adds `--goodput`."""
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        required=is_required,
        help="limits that a request must keep to count as good: ttft:500 tpot:50 e2el:8000",
    )


@dataclass(frozen=True, slots=True)
class Distribution:
    """A latency in milliseconds. Percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float

    @property
    def p99_to_p50(self) -> float | None:
        """The 99th percentile over the median; None if the median is 0."""
        return self.p99 / self.p50 if self.p50 else None


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that succeeded within the service level.

    Attributes:
        num_good: how many requests are good.
        share: their share of all requests, failed ones included.
        requests_per_s: good requests over the duration.
    """

    num_good: int
    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """The figures of a run.

    Attributes:
        num_requests: requests sent.
        num_failed: requests that were lost, refused, or got too few tokens.
        errors: how many requests failed for each reason.
        duration_s: from the first request sent to the last one ended.
        num_input_tokens: prompt tokens of the requests that succeeded.
        num_output_tokens: generated tokens of the requests that succeeded.
        requests_per_s: requests that succeeded, over the duration.
        input_tokens_per_s: prompt tokens over the duration.
        output_tokens_per_s: generated tokens over the duration.
        total_tokens_per_s: prompt and generated tokens over the duration.
        mean_concurrency: requests in flight, on average over time.
        peak_concurrency: the most requests in flight.
        ttft_ms: time to first token.
        itl_ms: time between tokens.
        tpot_ms: time per output token after the first.
        e2el_ms: time to the last message.
        goodput: None without a service level.
    """

    num_requests: int
    num_failed: int
    errors: dict[str, int]
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    mean_concurrency: float
    peak_concurrency: int
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2el_ms: Distribution | None
    goodput: Goodput | None


def compute_metrics(records: Sequence[MeasuredRequest], level: ServiceLevel | None) -> LoadMetrics:
    """Returns the figures of a run with at least one request."""
    done = [record for record in records if record.error is None]
    num_inputs = sum(record.num_prompt_tokens for record in done)
    num_outputs = sum(len(record.token_times_s) for record in done)
    duration_s = max(r.ended_s for r in records) - min(r.sent_s for r in records)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return LoadMetrics(
        num_requests=len(records),
        num_failed=len(records) - len(done),
        errors=_count_errors(records),
        duration_s=duration_s,
        num_input_tokens=num_inputs,
        num_output_tokens=num_outputs,
        requests_per_s=len(done) * per_s,
        input_tokens_per_s=num_inputs * per_s,
        output_tokens_per_s=num_outputs * per_s,
        total_tokens_per_s=(num_inputs + num_outputs) * per_s,
        mean_concurrency=sum(record.latency_s for record in records) * per_s,
        peak_concurrency=peak_concurrency(records),
        ttft_ms=distribution_of(first_tokens_ms(done)),
        itl_ms=distribution_of(token_gaps_ms(done)),
        tpot_ms=distribution_of(tokens_per_output_ms(done)),
        e2el_ms=distribution_of(latencies_ms(done)),
        goodput=_goodput(records, level, per_s) if level is not None else None,
    )


def distribution_of(values_ms: Sequence[float]) -> Distribution | None:
    """Returns the distribution of latencies in milliseconds; None without values."""
    if not values_ms:
        return None
    p50, p90, p99 = np.percentile(values_ms, (50, 90, 99))
    return Distribution(float(np.mean(values_ms)), float(p50), float(p90), float(p99))


def first_tokens_ms(records: Iterable[MeasuredRequest]) -> list[float]:
    """Returns the TTFT of each request that has a token."""
    seconds = (record.first_token_s for record in records)
    return [1000 * value for value in seconds if value is not None]


def token_gaps_ms(records: Iterable[MeasuredRequest]) -> list[float]:
    """Returns the ITL: every gap between two tokens of a request."""
    return [
        1000 * (late - early)
        for record in records
        for early, late in pairwise(record.token_times_s)
    ]


def tokens_per_output_ms(records: Iterable[MeasuredRequest]) -> list[float]:
    """Returns the TPOT of each request that has at least two tokens."""
    seconds = (record.token_gap_s for record in records)
    return [1000 * value for value in seconds if value is not None]


def latencies_ms(records: Iterable[MeasuredRequest]) -> list[float]:
    """Returns the E2E of each request."""
    return [1000 * record.latency_s for record in records]


def peak_concurrency(records: Iterable[MeasuredRequest]) -> int:
    """Returns the most requests in flight. One that ends when another is sent does not overlap."""
    changes = sorted(
        change for record in records for change in ((record.sent_s, 1), (record.ended_s, -1))
    )
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _count_errors(records: Iterable[MeasuredRequest]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            counts[record.error] = counts.get(record.error, 0) + 1
    return counts


def _goodput(records: Sequence[MeasuredRequest], level: ServiceLevel, per_s: float) -> Goodput:
    num_good = sum(level.is_met(record) for record in records)
    return Goodput(num_good, num_good / len(records), num_good * per_s)
