"""The primitives that are measured: the selected kernels beside the reference and the limit.

A new primitive is a function that yields cases, and a line in `PRIMITIVES`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

import kernels
from benchmarks.ceilings import kernel_threads, torch_threads
from benchmarks.kernels.attention import attention_cases, rotation_cases
from benchmarks.kernels.case import Case, DecoderShape, Numbers, Result
from benchmarks.kernels.cost import Cost
from benchmarks.kernels.draws import draw_cases, rule_cases
from benchmarks.kernels.pointwise import embed_cases, maxima_cases, norm_cases
from benchmarks.kernels.products import gated_linear_cases, linear_cases
from benchmarks.kernels.timing import Cycle, make_sweep, median_call_s, plan_cycle
from kernels import reference

__all__ = ["PRIMITIVES", "Outcome", "Setting", "find_difference", "make_cases", "measure"]

PRIMITIVES: Mapping[str, Callable[[DecoderShape, torch.dtype], Iterator[Case]]] = MappingProxyType(
    {
        "linear": linear_cases,
        "linear_silu_and_mul": gated_linear_cases,
        "paged_attention": attention_cases,
        "rotate_and_write_kv": rotation_cases,
        "rms_norm": norm_cases,
        "embed": embed_cases,
        "row_maxima": maxima_cases,
        "apply_logit_rules": rule_cases,
        "draw_tokens": draw_cases,
    }
)
"""Functions that yield a primitive's cases for a model and an element type, by name."""

_EPS32 = torch.finfo(torch.float32).eps
_NUM_ROUNDINGS = 8
"""Roundings to the inputs' type, of results and intermediate values, that are allowed for."""


def make_cases(primitives: Sequence[str], shape: DecoderShape, dtype: torch.dtype) -> list[Case]:
    """Returns all cases of the named `PRIMITIVES`."""
    return [case for name in primitives for case in PRIMITIVES[name](shape, dtype)]


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of all cases of a run.

    Attributes:
        dtype: of weights, KV and hidden states.
        num_threads: of the selected kernels, and of the reference.
        cache_bytes: size of the machine's largest cache.
    """

    dtype: torch.dtype
    num_threads: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a case, whose first four fields it repeats.

    Attributes:
        primitive: name in `kernels`.
        what: the use of the primitive in a model.
        size: rows, or sequences and their contexts, in words.
        cost: of a call.
        kernel_s: median seconds of a call of the selected kernels; None if the result is wrong.
        reference_s: median seconds of a call of the reference; None if `kernel_s` is None.
        difference: how the result differs from the reference's, in words; None if it is right.
    """

    primitive: str
    what: str
    size: str
    cost: Cost
    kernel_s: float | None = None
    reference_s: float | None = None
    difference: str | None = None


def measure(case: Case, setting: Setting) -> Outcome:
    """Checks a case, and times it if the check passes."""
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
    """Times calls, from recordings if possible; the reference's operations cannot be recorded."""
    calls = case.make_calls(numbers, cycle.num_copies)
    sweep = make_sweep(setting.cache_bytes) if cycle.must_sweep else None
    is_recordable = case.is_recordable and numbers.module is kernels
    return median_call_s(calls, is_recordable=is_recordable, sweep=sweep)


def find_difference(
    actual: Result, expected: Result, dtype: torch.dtype, num_terms: int
) -> str | None:
    """Describes how a result differs from the expected one, in words; None if it is right.

    Floating results may differ by some roundings to their type, and by what float32 sums lose:
    both in proportion to the element and to the root mean square of its neighbours on the last
    axis. Integers must be equal.

    Args:
        actual: the kernels' result.
        expected: the reference's result, with the same number of tensors.
        dtype: of the inputs.
        num_terms: terms of the longest sums.
    """
    for index, (left, right) in enumerate(zip(_tensors(actual), _tensors(expected), strict=True)):
        found = _difference_of_tensors(left, right, dtype, num_terms)
        if found is not None:
            return f"result {index}: {found}"
    return None


def _difference_of_tensors(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, num_terms: int
) -> str | None:
    if actual.shape != expected.shape:
        return f"has shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    error = (actual.double() - expected.double()).abs()
    if not expected.is_floating_point():
        num_far = int(error.count_nonzero())
        return f"{num_far} of {error.numel()} integers differ" if num_far else None
    relative = _NUM_ROUNDINGS * torch.finfo(dtype).eps + _EPS32 * math.sqrt(num_terms)
    rms = expected.double().square().mean(-1, keepdim=True).sqrt()
    is_far = ~(error <= relative * (expected.double().abs() + rms))  # NaN is far
    if not is_far.any():
        return None
    largest = float(error.nan_to_num(torch.inf).max())
    return f"{int(is_far.sum())} of {is_far.numel()} elements are off, by up to {largest:.3g}"


def _tensors(result: Result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
