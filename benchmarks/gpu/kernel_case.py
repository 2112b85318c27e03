"""`KernelCase`: a kernel on inputs of one shape, checked against the reference, then timed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Record, summary
from benchmarks.gpu.timing import Call, time_calls
from benchmarks.kernels.case import Result
from benchmarks.kernels.cost import Cost
from benchmarks.kernels.measure import find_difference
from benchmarks.model_cost import Ceilings

__all__ = ["KernelCase", "Prepared", "measure_case", "normal"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Inputs on the device.

    Attributes:
        calls: calls of equal work, each on a copy of the inputs of its own.
        compare: returns the results of the kernel and of the reference in float32 on equal inputs.
    """

    calls: Sequence[Call]
    compare: Callable[[], tuple[Result, Result]]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel on inputs of one shape.

    Attributes:
        name: the kernel's name.
        size: the size of its inputs, in words.
        cost: the bytes and operations that a call needs.
        num_terms: terms of the longest sums; errors grow with it.
        prepare: makes the given number of copies of the inputs.
    """

    name: str
    size: str
    cost: Cost
    num_terms: int
    prepare: Callable[[int], Prepared]


def measure_case(case: KernelCase, plan: Plan, ceilings: Ceilings | None, record: Record) -> None:
    """Adds a case's figures to the record. A kernel with a wrong result gets no figures."""
    record.attempt("kernel", f"{case.name}, {case.size}", lambda: _measure(case, plan, ceilings))


def normal(plan: Plan, *shape: int, seed: int = 0) -> torch.Tensor:
    """Returns normal numbers of the plan's type, the same for equal shape and seed."""
    generator = torch.Generator(plan.device).manual_seed(seed)
    dtype = getattr(torch, plan.dtype)
    return torch.randn(shape, generator=generator, dtype=dtype, device=plan.device)


def _measure(case: KernelCase, plan: Plan, ceilings: Ceilings | None) -> dict[str, Any]:
    wanted = -(-plan.rotated_bytes // case.cost.num_bytes)
    prepared = case.prepare(max(1, min(plan.max_copies, wanted)))
    with torch.inference_mode():
        actual, expected = prepared.compare()
        difference = find_difference(actual, expected, getattr(torch, plan.dtype), case.num_terms)
        if difference is not None:
            return {"failed": f"the result differs from the reference: {difference}"}
        del actual, expected
        samples = time_calls(prepared.calls, torch.device(plan.device), plan.sample_s)
    facts = {"bytes": case.cost.num_bytes, "operations": case.cost.num_operations}
    return summary(samples, case.cost, ceilings) | facts
