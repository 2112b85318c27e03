"""Which parts a run has, in which order, and what share of its time each may take. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.plan import Plan

__all__ = ["Part", "parts_of", "time_for"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run.

    Attributes:
        name: to ask for it.
        module: whose `measure` it is.
        weight: of its time, beside the others'.
        model: the one it measures, if it is about one.
    """

    name: str
    module: str
    weight: float
    model: str | None = None


def parts_of(plan: Plan) -> list[Part]:
    """Rates first: the others' figures are shares of them. Then what aims are set for."""
    package = "benchmarks.gpu.parts"
    served, largest = plan.models, plan.models[0]
    return [
        Part("rates", f"{package}.rates", 25),
        Part("kernels", f"{package}.kernels", 110),
        *(Part(f"model {name}", f"{package}.model", 90, name) for name in plan.models),
        Part("tiers", f"{package}.tiers", 60, largest),
        *(Part(f"transformers {name}", f"{package}.transformers", 50, name) for name in served),
    ]


def time_for(parts: Sequence[Part], index: int, seconds_left: float) -> float:
    """Seconds for a part: what those before it did not need goes to all that follow."""
    return seconds_left * parts[index].weight / sum(part.weight for part in parts[index:])
