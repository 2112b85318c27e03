"""The primitives that are measured: the selected kernels beside the reference and the limit.

A new primitive is a function that yields cases, and a line in `PRIMITIVES`.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

import kernels
from benchmarks.ceilings import kernel_threads, torch_threads
from benchmarks.kernels.attention import attention_cases, rotation_cases
from benchmarks.kernels.case import CPU, SIZES, Case, Cost, DecoderShape, Numbers, Result, Sizes
from benchmarks.kernels.draws import draw_cases, rule_cases
from benchmarks.kernels.layers import (
    embed_cases,
    gated_linear_cases,
    gather_cases,
    linear_cases,
    maxima_cases,
    norm_cases,
    scatter_cases,
)
from benchmarks.kernels.quantized import quantized_cases
from benchmarks.kernels.timing import Cycle, make_sweep, median_call_s, plan_cycle, sample_calls
from benchmarks.report import describe_error
from kernels import reference

__all__ = [
    "PRIMITIVES",
    "KernelOutcome",
    "KernelSetting",
    "find_difference",
    "make_cases",
    "measure",
]

MakeCases = Callable[[DecoderShape, torch.dtype, Sizes], Iterator[Case]]
PRIMITIVES: Mapping[str, MakeCases] = MappingProxyType(
    {
        "linear": linear_cases,
        "linear_gated": gated_linear_cases,
        "linear_quantized": quantized_cases,
        "paged_attention": attention_cases,
        "rotate_and_write_kv": rotation_cases,
        "rms_norm": norm_cases,
        "embed": embed_cases,
        "row_maxima": maxima_cases,
        "apply_logit_rules": rule_cases,
        "draw_tokens": draw_cases,
        "gather_blocks": gather_cases,
        "scatter_blocks": scatter_cases,
    }
)
"""Functions that yield a primitive's cases for a model and an element type, by name."""

_EPS32 = torch.finfo(torch.float32).eps
_NUM_ROUNDINGS = 8
"""Roundings to the inputs' type, of results and intermediate values, that are allowed for."""


def make_cases(
    primitives: Sequence[str], shape: DecoderShape, dtype: torch.dtype, device: torch.device = CPU
) -> list[Case]:
    """Returns all cases of the named `PRIMITIVES`."""
    sizes = SIZES[device.type]
    return [case for name in primitives for case in PRIMITIVES[name](shape, dtype, sizes)]


@dataclass(frozen=True, slots=True)
class KernelSetting:
    """The setting of all cases of a run.

    Attributes:
        dtype: of weights, KV and hidden states.
        num_threads: of the selected kernels, and of the reference.
        cache_bytes: size of the largest cache.
        device: where the kernels compute.
    """

    dtype: torch.dtype
    num_threads: int
    cache_bytes: int
    device: torch.device = CPU


@dataclass(frozen=True, slots=True)
class KernelOutcome:
    """The outcome of a case, whose first four fields it repeats.

    Attributes:
        primitive: name in `kernels`.
        what: the use of the primitive in a model.
        size: rows, or sequences and their contexts, in words.
        cost: of a call.
        kernel_s: median seconds of a call of the selected kernels; None if the result is wrong.
        reference_s: median seconds of a call of the reference; None if `kernel_s` is None, and on
            a GPU.
        difference: how the result differs from the reference's, in words, or the error of a call;
            None if it is right.
    """

    primitive: str
    what: str
    size: str
    cost: Cost
    kernel_s: float | None = None
    reference_s: float | None = None
    difference: str | None = None


def measure(case: Case, setting: KernelSetting) -> KernelOutcome:
    """Checks a case, and times it if the check passes."""
    known = (case.primitive, case.what, case.size, case.cost)
    try:
        with torch.inference_mode():
            difference = _check(case, setting)
            if difference is not None:
                return KernelOutcome(*known, difference=difference)
            return KernelOutcome(*known, *_times(case, setting))
    except Exception as error:  # any error ends this case, but not the run
        return KernelOutcome(*known, difference=describe_error(error))


def _times(case: Case, setting: KernelSetting) -> tuple[float, float | None]:
    """Returns the median seconds of the kernels and of the reference."""
    numbers = Numbers(kernels, setting.dtype, setting.dtype, setting.device)
    cycle = plan_cycle(case.cost.num_bytes, case.max_copies, setting.cache_bytes)
    if setting.device.type != "cpu":
        return statistics.median(sample_calls(case.make_calls(numbers, cycle.num_copies))), None
    with kernel_threads(setting.num_threads):
        kernel_s = _time(case, numbers, cycle, setting)
    with torch_threads(setting.num_threads):
        return kernel_s, _time(case, replace(numbers, module=reference), cycle, setting)


def _check(case: Case, setting: KernelSetting) -> str | None:
    numbers = Numbers(kernels, setting.dtype, setting.dtype, setting.device)
    with kernel_threads(setting.num_threads):
        (call,) = case.make_calls(numbers, 1)
        actual = call()
    with torch_threads(setting.num_threads):
        exact = replace(numbers, module=reference, kept_as=torch.float32)
        (call,) = case.make_calls(exact, 1)
        return find_difference(actual, call(), setting.dtype, case.num_terms)


def _time(case: Case, numbers: Numbers, cycle: Cycle, setting: KernelSetting) -> float:
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
