"""What the rounds come to: medians, ratios to the best peer, floors. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.model_cost import Ceilings, ModelShape
from benchmarks.peers.cases import Case, Figure
from benchmarks.peers.rounds import Runs

__all__ = ["BATON", "summarize"]

BATON = "baton"


def summarize(
    runs: Runs, cases: Sequence[Case], shape: ModelShape, ceilings: Ceilings
) -> list[dict[str, Any]]:
    """One entry per figure of each case.

    Each has its `case` and `figure`, which way is better, the `floor`, the
    `median` and all `values` by engine, and with Baton and a peer among the
    engines `best_peer` and `baton_to_best_peer`, Baton's median over the peer's.
    """
    return [
        _entry(case, figure, {name: by_case[case.name] for name, by_case in runs.items()})
        | {"floor": round(figure.floor(case.requests, shape, ceilings), 2)}
        for case in cases
        for figure in case.figures
    ]


def _entry(case: Case, figure: Figure, runs: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    values = {
        name: [figure.of_run(case.requests, run) for run in own] for name, own in runs.items()
    }
    medians = {name: statistics.median(own) for name, own in values.items()}
    return {
        "case": case.name,
        "figure": figure.name,
        "is_less_better": figure.is_less_better,
        "median": {name: round(median, 2) for name, median in medians.items()},
        "values": {name: [round(value, 2) for value in own] for name, own in values.items()},
        **_ratio(medians, figure.is_less_better),
    }


def _ratio(medians: Mapping[str, float], is_less_better: bool) -> dict[str, Any]:
    peers = [name for name in medians if name != BATON]
    if BATON not in medians or not peers:
        return {}
    best = (min if is_less_better else max)(peers, key=lambda name: medians[name])
    return {"best_peer": best, "baton_to_best_peer": round(medians[BATON] / medians[best], 3)}
