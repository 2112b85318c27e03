"""Tables of a run's results, each figure beside its limit. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report.report import Table

__all__ = ["failures_of", "make_tables", "skipped_of", "with_ratios"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of results.

    Attributes:
        title: the title of its table.
        columns: for each column, the name of the figure in the results.
        note: a text below the table.
    """

    title: str
    columns: Mapping[str, str]
    note: str = ""


_US, _FLOOR_US = "median_us", "floor_us"
_KINDS = {
    "rate": _Kind("Ceilings", {"us": _US, "GB/s": "gb_per_s", "TFLOP/s": "tflop_per_s"}),
    "kernel": _Kind(
        "Kernels",
        {
            "us": _US,
            "GB/s": "gb_per_s",
            "TFLOP/s": "tflop_per_s",
            "share of ceiling": "share_of_ceiling",
            "limit": "limit",
        },
        "Launched by a CUDA graph; each was checked against the reference. Calls take turns on up "
        "to 256 copies of their inputs: all but a few rows of hidden states come from memory.",
    ),
    "decode step": _Kind(
        "Decode steps of the runner",
        {"us": _US, "floor, us": _FLOOR_US, "x floor": "times_floor"},
        "Floor: weights and KV read once at the copy bandwidth, or operations at the matrix rate.",
    ),
    "device busy": _Kind("Time that the device works on a decode step of the runner", {"us": _US}),
    "engine step": _Kind(
        "Decode steps of the engine",
        {
            "us": _US,
            "floor, us": _FLOOR_US,
            "x floor": "times_floor",
            "device idle": "idle_share",
        },
        "Idle: the share of a step in which the device does not work, from its working time on the "
        "runner's steps at equal contexts. Below zero: that time was measured as the longer one.",
    ),
    "prefill": _Kind(
        "Prompts",
        {
            "us": _US,
            "tokens/s": "tokens_per_s",
            "floor, us": _FLOOR_US,
            "share of matrix rate": "share_of_ceiling",
        },
    ),
    "tiers": _Kind(
        "Two tiers on one card",
        {
            "first token, ms": "first_token_ms",
            "second token, ms": "second_token_ms",
            "step, ms": "step_ms",
            "tokens/s": "output_tokens_per_s",
        },
    ),
    "served": _Kind(
        "Requests that come at once",
        {"tokens/s": "output_tokens_per_s", "x transformers": "times_transformers"},
    ),
    "served by transformers": _Kind(
        "The same served by transformers' continuous batching",
        {"tokens/s": "output_tokens_per_s", "attention": "attention"},
    ),
}


def make_tables(results: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Returns a table for each kind of results that occurs."""
    tables = []
    for name, kind in _KINDS.items():
        own = [result for result in results if result["kind"] == name]
        if own:
            rows = [[result["name"], *_cells(result, kind)] for result in own]
            tables.append(Table(kind.title, ("", *kind.columns), rows, kind.note))
    return tables


def with_ratios(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the results; served rates get their ratio to transformers' on the same model."""
    rates = {
        result["name"]: result["output_tokens_per_s"]
        for result in results
        if result["kind"] == "served by transformers" and "output_tokens_per_s" in result
    }
    return [dict(result) | _ratio(result, rates) for result in results]


def failures_of(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each part and each figure that failed."""
    parts = [
        f"{report['part']}: {report['problem'].splitlines()[-1]}"
        for report in reports
        if report["problem"]
    ]
    return parts + _marked("failed", reports)


def skipped_of(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each figure that this device lacks memory for, and for each part that
    lacks a module.
    """
    return _marked("skipped", reports)


def _marked(how: str, reports: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{result['kind']}, {result['name']}: {result[how]}"
        for report in reports
        for result in report["results"]
        if how in result
    ]


def _ratio(result: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, float]:
    if result["kind"] != "served" or result["name"] not in rates:
        return {}
    own = result.get("output_tokens_per_s")
    return {} if own is None else {"times_transformers": own / rates[result["name"]]}


def _cells(result: Mapping[str, Any], kind: _Kind) -> list[Any]:
    for how in ("failed", "skipped"):
        if how in result:
            return [how, *[""] * (len(kind.columns) - 1)]
    return [result.get(field) for field in kind.columns.values()]
