"""Summarizes rounds: medians, ratios to the best peer, floors, agreement of tokens. Pure.

The agreement with greedy tokens of transformers in float32 is a sanity check. Rounding to bfloat16
changes near-ties, and random weights have many. So correct engines differ from the reference after
some tokens, and all their later tokens differ. An engine that differs at once on most prompts is
wrong.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.model_cost import Ceilings, ModelShape
from benchmarks.peers.cases import Figure, PeerCase
from benchmarks.peers.peer_messages import PeerAnswer
from benchmarks.peers.rounds import Runs

__all__ = ["BATON", "first_difference", "summarize", "summarize_agreement"]

BATON = "baton"


def summarize(
    runs: Runs, cases: Sequence[PeerCase], shape: ModelShape, ceilings: Ceilings
) -> list[dict[str, Any]]:
    """Returns an entry for each figure of each case.

    An entry has the `case`, the `figure`, `is_less_better`, the `floor`, and by engine the `median`
    and all `values`. If the engines are Baton and at least one peer, it also has `best_peer`, and
    `baton_to_best_peer`: Baton's median over that peer's.
    """
    return [
        _entry(case, figure, {name: by_case[case.name] for name, by_case in runs.items()})
        | {"floor": round(figure.floor(case.requests, shape, ceilings), 2)}
        for case in cases
        for figure in case.figures
    ]


def _entry(case: PeerCase, figure: Figure, runs: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
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


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Returns how many tokens agree before the first difference."""
    pairs = zip(tokens, expected, strict=True)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), len(tokens))


def summarize_agreement(
    answers: Sequence[PeerAnswer], expected: Sequence[PeerAnswer]
) -> dict[str, object]:
    """Returns, for each prompt, the tokens before the first difference and all tokens."""
    agreeing = [
        first_difference(answer.token_ids, other.token_ids)
        for answer, other in zip(answers, expected, strict=True)
    ]
    return {"agreeing": agreeing, "of": [len(answer.token_ids) for answer in answers]}
