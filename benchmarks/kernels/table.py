"""The outcomes of a primitive as a table, and as plain data: rates and ratios to the limit."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.kernels.cost import limit_s
from benchmarks.kernels.measure import KernelOutcome
from benchmarks.model_cost import Ceilings
from benchmarks.report.report import Cell, Table

__all__ = ["make_tables", "to_plain"]

_COLUMNS = (
    *("what", "size", "ours us", "GB/s", "GFLOP/s", "limit us", "ours / limit"),
    *("torch us", "torch / ours"),
)
_MIN_CREDIBLE_RATIO = 0.9
"""Least credible ratio of a median to its limit: ceilings vary by some percent."""


def make_tables(outcomes: Sequence[KernelOutcome], ceilings: Ceilings) -> list[Table]:
    """Returns one table per primitive, in the order of the outcomes."""
    return [
        _table(name, [outcome for outcome in outcomes if outcome.primitive == name], ceilings)
        for name in dict.fromkeys(outcome.primitive for outcome in outcomes)
    ]


def to_plain(outcome: KernelOutcome, ceilings: Ceilings) -> dict[str, Any]:
    """Returns an outcome as plain data for JSON."""
    return asdict(outcome) | {"limit_s": limit_s(outcome.cost, ceilings)}


def _table(primitive: str, outcomes: Sequence[KernelOutcome], ceilings: Ceilings) -> Table:
    rows = [_row(outcome, ceilings) for outcome in outcomes]
    return Table(primitive, _COLUMNS, rows, " ".join(_notes(outcomes, ceilings)))


def _notes(outcomes: Sequence[KernelOutcome], ceilings: Ceilings) -> Iterator[str]:
    wrong = [
        f"{outcome.what}, {outcome.size}: {outcome.difference}"
        for outcome in outcomes
        if outcome.difference is not None
    ]
    if wrong:
        yield f"Wrong results, not measured: {'; '.join(wrong)}."
    if any(
        outcome.kernel_s is not None
        and outcome.kernel_s < _MIN_CREDIBLE_RATIO * limit_s(outcome.cost, ceilings)
        for outcome in outcomes
    ):
        yield (
            "Faster than the limit: the machine was disturbed while its ceilings were measured. "
            "Measure again."
        )


def _row(outcome: KernelOutcome, ceilings: Ceilings) -> list[Cell]:
    limit, cost = limit_s(outcome.cost, ceilings), outcome.cost
    if outcome.kernel_s is None:
        return [outcome.what, outcome.size, None, None, None, 1e6 * limit, None, None, None]
    return [
        outcome.what,
        outcome.size,
        1e6 * outcome.kernel_s,
        cost.num_bytes / outcome.kernel_s / 1e9,
        cost.num_operations / outcome.kernel_s / 1e9 if cost.num_operations else None,
        1e6 * limit,
        outcome.kernel_s / limit,
        *_compared(outcome.kernel_s, outcome.reference_s),
    ]


def _compared(kernel_s: float, reference_s: float | None) -> list[Cell]:
    return [None, None] if reference_s is None else [1e6 * reference_s, reference_s / kernel_s]
