"""Steps of an engine in this process, by phase."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.offline.offline_engine import MeasuredStep, OfflineEngine
from benchmarks.request import BenchRequest
from engine.metrics.counts import PHASES

__all__ = ["StepProfile", "profile_steps"]


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Medians of many steps of one kind.

    Attributes:
        kind: "prefill": steps that compute prompts; "decode": steps that do not.
        batch_size: number of requests.
        num_steps: number of steps.
        total_us: microseconds of a step.
        phases_us: microseconds of each phase. Medians do not exactly add up to the total.
    """

    kind: str
    batch_size: int
    num_steps: int
    total_us: float
    phases_us: dict[str, float]


def profile_steps(engine: OfflineEngine, requests: Sequence[BenchRequest]) -> list[StepProfile]:
    """Runs requests that start together, and profiles the steps of each kind.

    Steps after the end of a request do not count.
    """
    kinds: dict[str, list[MeasuredStep]] = {"prefill": [], "decode": []}
    num_begun = 0
    for step in engine.run_timed(requests).steps:
        kinds["prefill" if num_begun < len(requests) else "decode"].append(step)
        num_begun += step.num_begun
        if step.num_ended:
            break
    return [_median(kind, len(requests), steps) for kind, steps in kinds.items() if steps]


def _median(kind: str, batch_size: int, steps: Sequence[MeasuredStep]) -> StepProfile:
    return StepProfile(
        kind=kind,
        batch_size=batch_size,
        num_steps=len(steps),
        total_us=1e6 * statistics.median(step.seconds for step in steps),
        phases_us={
            phase: 1e6 * statistics.median(step.phases.get(phase, 0.0) for step in steps)
            for phase in PHASES
        },
    )
