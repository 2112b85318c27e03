"""One case, measured: the selected kernels beside the reference and the limit."""

from dataclasses import dataclass

import torch

import kernels
from benchmarks.ceilings import kernel_threads, torch_threads
from benchmarks.kernels.cache import Cycle, make_sweep, plan_cycle
from benchmarks.kernels.case import Case, Numbers
from benchmarks.kernels.check import find_difference
from benchmarks.kernels.cost import Cost
from benchmarks.kernels.timing import median_call_s
from kernels import reference

__all__ = ["Outcome", "Setting", "measure"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases of a run share.

    Attributes:
        dtype: of weights, KV and hidden states.
        num_threads: of the selected kernels, and of the reference.
        cache_bytes: of its largest cache.
    """

    dtype: torch.dtype
    num_threads: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a case.

    Attributes:
        primitive: as in the case.
        what: as in the case.
        size: as in the case.
        cost: as in the case.
        kernel_s: median seconds of the selected kernels' call; None if its result is wrong.
        reference_s: median seconds of the reference's call; None as well.
        difference: from what the reference gives, in words; None if there is none that matters.
    """

    primitive: str
    what: str
    size: str
    cost: Cost
    kernel_s: float | None = None
    reference_s: float | None = None
    difference: str | None = None


def measure(case: Case, setting: Setting) -> Outcome:
    """Checks a case, then times it; one that fails the check is not timed."""
    known = (case.primitive, case.what, case.size, case.cost)
    difference = _check(case, setting)
    if difference is not None:
        return Outcome(*known, difference=difference)
    cycle = plan_cycle(case.cost.num_bytes, case.max_copies, setting.cache_bytes)
    with kernel_threads(setting.num_threads):
        kernel_s = _time(case, Numbers(kernels, setting.dtype, setting.dtype), cycle, setting)
    with torch_threads(setting.num_threads):
        reference_s = _time(case, Numbers(reference, setting.dtype, setting.dtype), cycle, setting)
    return Outcome(*known, kernel_s, reference_s)


def _check(case: Case, setting: Setting) -> str | None:
    dtype = setting.dtype
    with kernel_threads(setting.num_threads):
        (call,) = case.make_calls(Numbers(kernels, dtype, dtype), 1)
        actual = call()
    with torch_threads(setting.num_threads):
        (call,) = case.make_calls(Numbers(reference, dtype, torch.float32), 1)
        return find_difference(actual, call(), dtype, case.num_terms)


def _time(case: Case, numbers: Numbers, cycle: Cycle, setting: Setting) -> float:
    """Recorded only where the kernels can: the reference's operations are torch's."""
    calls = case.make_calls(numbers, cycle.num_copies)
    sweep = make_sweep(setting.cache_bytes) if cycle.must_sweep else None
    is_recordable = case.is_recordable and numbers.module is kernels
    return median_call_s(calls, is_recordable=is_recordable, sweep=sweep)
