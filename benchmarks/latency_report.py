"""Tables and plots of latencies, for the commands that send requests. Pure."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from benchmarks.metrics import (
    Distribution,
    LoadMetrics,
    ServiceLevel,
    first_tokens_ms,
    latencies_ms,
    token_gaps_ms,
    tokens_per_output_ms,
)
from benchmarks.report import Panel, Series, Table
from benchmarks.request import MeasuredRequest

__all__ = [
    "cumulative",
    "error_tables",
    "in_flight",
    "latency_panels",
    "latency_table",
    "throughput_table",
    "token_rate",
]

_LATENCIES = (
    ("TTFT", "ttft_ms"),
    ("ITL", "itl_ms"),
    ("TPOT", "tpot_ms"),
    ("E2E", "e2el_ms"),
)
_MAX_ERRORS = 10
_MAX_POINTS = 400
_MAX_GAPS = 4000
_NUM_BINS = 60
_WIDE = 10
"""If the longest latency is more than so many medians, the scale is logarithmic."""


def latency_table(metrics: LoadMetrics) -> Table:
    """Returns the table of TTFT, ITL, TPOT and E2E."""
    rows = [(name, *_cells(getattr(metrics, field))) for name, field in _LATENCIES]
    return Table("Latency, ms", ("", "mean", "p50", "p90", "p99", "p99 / p50"), rows)


def throughput_table(metrics: LoadMetrics) -> Table:
    """Returns the table of counts, rates, concurrency, and goodput with a service level."""
    rows: list[tuple[str, float | int | str]] = [
        ("requests", metrics.num_requests),
        ("failed", metrics.num_failed),
        ("duration, s", metrics.duration_s),
        ("input tokens", metrics.num_input_tokens),
        ("output tokens", metrics.num_output_tokens),
        ("requests/s", metrics.requests_per_s),
        ("input tokens/s", metrics.input_tokens_per_s),
        ("output tokens/s", metrics.output_tokens_per_s),
        ("total tokens/s", metrics.total_tokens_per_s),
        ("concurrency, mean", metrics.mean_concurrency),
        ("concurrency, peak", metrics.peak_concurrency),
    ]
    if metrics.goodput is not None:
        rows += [
            ("goodput, requests/s", metrics.goodput.requests_per_s),
            ("good requests", f"{100 * metrics.goodput.share:.1f}%"),
        ]
    return Table("Throughput", ("", "value"), rows)


def error_tables(metrics: LoadMetrics) -> Sequence[Table]:
    """Returns a table of why requests failed, the most frequent reason first, or no table."""
    if not metrics.errors:
        return ()
    reasons = sorted(metrics.errors.items(), key=lambda item: -item[1])
    note = f"and {len(reasons) - _MAX_ERRORS} more reasons" if len(reasons) > _MAX_ERRORS else ""
    return (Table("Failures", ("reason", "requests"), reasons[:_MAX_ERRORS], note),)


def _cells(figures: Distribution | None) -> tuple[float | None, ...]:
    if figures is None:
        return (None,) * 5
    return (figures.mean, figures.p50, figures.p90, figures.p99, figures.p99_to_p50)


def latency_panels(
    records: Sequence[MeasuredRequest], level: ServiceLevel | None
) -> tuple[Panel, ...]:
    """Returns plots of the latencies, and of throughput, concurrency, TTFT and the gaps between
    tokens over time.
    """
    done = [record for record in records if record.error is None]
    limits = level or ServiceLevel()
    ttft, itl, tpot = first_tokens_ms(done), token_gaps_ms(done), tokens_per_output_ms(done)
    return (
        _distribution("Time to first token", {"TTFT": ttft}, limits.ttft_ms),
        _distribution("Time between tokens", {"ITL": itl, "TPOT": tpot}, limits.tpot_ms),
        _distribution("Time to the end", {"E2E": latencies_ms(done)}, limits.e2el_ms),
        Panel(
            "Output over time",
            "seconds",
            "output tokens/s",
            [Series("", *token_rate(records), style="fill")],
        ),
        Panel(
            "Requests in flight",
            "seconds",
            "requests",
            [Series("", *in_flight(records), style="fill")],
        ),
        _first_tokens_over_time(done, limits.ttft_ms),
        _gaps_over_time(done),
    )


def cumulative(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns values of a distribution, and the share that is at most as large as each."""
    if not values:
        return [], []
    shares = np.linspace(0, 1, min(_MAX_POINTS, max(2, len(values))))
    return np.quantile(values, shares).tolist(), shares.tolist()


def token_rate(records: Iterable[MeasuredRequest]) -> tuple[list[float], list[float]]:
    """Returns bins of time, and the tokens per second in each. The last rate is 0."""
    times = [time_s for record in records for time_s in record.token_times_s]
    if not times:
        return [], []
    width_s = _bin_width_s(times)
    num_bins = math.ceil(max(times) / width_s) + 1
    counts = np.bincount([int(time_s // width_s) for time_s in times], minlength=num_bins)
    starts = [index * width_s for index in range(num_bins + 1)]
    return starts[: len(counts) + 1], [*(counts / width_s).tolist(), 0.0][: len(starts)]


def in_flight(records: Iterable[MeasuredRequest]) -> tuple[list[float], list[float]]:
    """Returns times at which requests are sent or end, and how many are in flight after each."""
    changes = sorted(
        change for record in records for change in ((record.sent_s, 1), (record.ended_s, -1))
    )
    numbers = accumulate(change for _, change in changes)
    return [time_s for time_s, _ in changes], [float(number) for number in numbers]


def _distribution(
    title: str, latencies: dict[str, Sequence[float]], limit_ms: float | None
) -> Panel:
    is_wide = any(map(_is_wide, latencies.values()))
    series = [
        Series(name if len(latencies) > 1 else "", *_cut(*cumulative(values), is_wide))
        for name, values in latencies.items()
    ]
    return Panel(
        title,
        "milliseconds",
        "share at most as long",
        series,
        x_limits={} if limit_ms is None else {f"limit {limit_ms:g}": limit_ms},
        x_scale="log" if is_wide else "linear",
    )


def _is_wide(values: Sequence[float]) -> bool:
    """Returns whether a logarithmic scale shows the values better."""
    return bool(values) and max(values) > _WIDE * float(np.median(values)) > 0


def _cut(xs: list[float], shares: list[float], is_wide: bool) -> tuple[list[float], list[float]]:
    """Removes values near 0, which a logarithmic scale cannot show: tokens of one message."""
    least = xs[len(xs) // 2] / _WIDE if is_wide and xs else 0.0
    first = next((index for index, x in enumerate(xs) if x >= least), 0)
    return xs[first:], shares[first:]


def _first_tokens_over_time(done: Sequence[MeasuredRequest], limit_ms: float | None) -> Panel:
    return Panel(
        "TTFT by time of sending",
        "sent, seconds",
        "TTFT, milliseconds",
        [Series("", [record.sent_s for record in done], first_tokens_ms(done), style="points")],
        y_limits={} if limit_ms is None else {f"limit {limit_ms:g}": limit_ms},
    )


def _gaps_over_time(done: Sequence[MeasuredRequest]) -> Panel:
    """Returns a plot of each token's gap to the one before, with percentiles by bins of time."""
    pairs = sorted(
        (time_s, 1000 * (time_s - before_s))
        for record in done
        for before_s, time_s in pairwise(record.token_times_s)
        if time_s > before_s  # else both are of one message
    )
    shown = pairs[:: len(pairs) // _MAX_GAPS + 1]
    times_s, gaps_ms = [time_s for time_s, _ in shown], [gap_ms for _, gap_ms in shown]
    series = [
        Series("", times_s, gaps_ms, style="points"),
        Series("p50", *_percentiles(pairs, 50), style="steps"),
        Series("p99", *_percentiles(pairs, 99), style="steps"),
    ]
    return Panel(
        "Time between tokens by time of arrival",
        "seconds",
        "milliseconds",
        series,
        y_scale="log" if _is_wide([gap_ms for _, gap_ms in pairs]) else "linear",
    )


def _percentiles(
    pairs: Sequence[tuple[float, float]], percent: int
) -> tuple[list[float], list[float]]:
    """Returns starts of bins of time, and a percentile of the values in each; the last value lasts
    until the end.
    """
    if not pairs:
        return [], []
    width_s = _bin_width_s([time_s for time_s, _ in pairs])
    bins: dict[int, list[float]] = {}
    for time_s, value in pairs:
        bins.setdefault(int(time_s // width_s), []).append(value)
    values = [float(np.percentile(bin_values, percent)) for bin_values in bins.values()]
    return [*(index * width_s for index in bins), pairs[-1][0]], [*values, values[-1]]


def _bin_width_s(times_s: Sequence[float]) -> float:
    return _round_up(max(*times_s, 1e-3) / _NUM_BINS)


def _round_up(width_s: float) -> float:
    """Returns the next larger 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(width_s))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width_s)
