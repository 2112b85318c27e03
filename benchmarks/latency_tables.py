"""Tables of a run's metrics, for every command that sends requests. Pure."""

from collections.abc import Sequence

from benchmarks.metrics import Distribution, Metrics
from benchmarks.report.report import Table

__all__ = ["error_tables", "latency_table", "throughput_table"]

_LATENCIES = (
    ("TTFT", "ttft_ms"),
    ("ITL", "itl_ms"),
    ("TPOT", "tpot_ms"),
    ("E2E", "e2el_ms"),
)
_MAX_ERRORS = 10


def latency_table(metrics: Metrics) -> Table:
    """TTFT, ITL, TPOT and E2E."""
    rows = [(name, *_cells(getattr(metrics, field))) for name, field in _LATENCIES]
    return Table("Latency, ms", ("", "mean", "p50", "p90", "p99"), rows)


def throughput_table(metrics: Metrics) -> Table:
    """Requests, tokens, rates, concurrency, and goodput if there is a service level."""
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


def error_tables(metrics: Metrics) -> Sequence[Table]:
    """Why requests failed, the most frequent reasons first; none if none did."""
    if not metrics.errors:
        return ()
    reasons = sorted(metrics.errors.items(), key=lambda item: -item[1])
    note = f"and {len(reasons) - _MAX_ERRORS} more reasons" if len(reasons) > _MAX_ERRORS else ""
    return (Table("Failures", ("reason", "requests"), reasons[:_MAX_ERRORS], note),)


def _cells(figures: Distribution | None) -> tuple[float | None, ...]:
    if figures is None:
        return (None,) * 4
    return (figures.mean, figures.p50, figures.p90, figures.p99)
