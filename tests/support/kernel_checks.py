"""Helpers of the kernels' tests: types, weights, thread counts and error bounds."""

from collections.abc import Sequence

import pytest
import torch

import kernels
from kernels import Activation
from kernels.library.commands import library

__all__ = [
    "CPU",
    "DTYPES",
    "IS_NATIVE",
    "assert_within",
    "eps_of",
    "filled_weight",
    "gated_values",
    "native_only",
    "normal",
    "on_threads",
    "product_bound",
    "spacing_at_zero",
]

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
IS_NATIVE = library() is not None

_EPS32 = torch.finfo(torch.float32).eps


def native_only(reason):
    """Marks a test of properties that torch's operations lack; `reason` names why."""
    return pytest.mark.skipif(not IS_NATIVE, reason=f"native kernels only: {reason}")


def normal(*shape, dtype=torch.float32, seed=0):
    """Returns normally distributed numbers, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def filled_weight(matrix, use=kernels.WeightUse.LINEAR):
    """Returns a weight that holds `matrix`; the halves of a gated one are filled one by one."""
    weight = kernels.make_weight(*matrix.shape, matrix.dtype, CPU, use)
    num_parts = 2 if use is kernels.WeightUse.GATED_LINEAR else 1
    count = len(matrix) // num_parts
    for part in range(num_parts):
        weight.rows(part * count, count).copy_(matrix[part * count : (part + 1) * count])
    return weight


def eps_of(dtype):
    """Returns the distance of 1 from the next number: twice the error of a rounding."""
    return torch.finfo(dtype).eps


def spacing_at_zero(dtype):
    """Returns the distance of 0 from the next number, the unit of errors of subnormal results."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def product_bound(hidden, matrix):
    """Returns how far float32 sums of products may be from `hidden @ matrix.T`, by element.

    Each of n additions errs by up to half an eps of the sum of magnitudes, in either direction,
    so that all of them err by a fraction of sqrt(n) eps.
    """
    num_eps = 2 + hidden.shape[1] ** 0.5 / 4
    return num_eps * _EPS32 * (hidden.double().abs() @ matrix.double().abs().T)


def gated_values(values, activation):
    """Returns the factors of activated gates: the values, or clamped ones plus 1."""
    return values.clamp(-7, 7) + 1 if activation is Activation.CLAMPED_SILU else values


def assert_within(actual, expected, bound):
    """Asserts that every element of `actual` is within `bound` of `expected`, and none is NaN."""
    error = (actual.double() - expected).abs()
    is_far = ~(error <= bound + 1e-30)  # NaN is far
    assert not is_far.any(), (
        f"{int(is_far.sum())} of {is_far.numel()} are off, the first at "
        f"{is_far.nonzero()[0].tolist()}, by up to {error.nan_to_num(torch.inf).max():.3g}"
    )


def on_threads(counts: Sequence[int], compute):
    """Returns the result of `compute` with each number of threads; restores the number."""
    before = kernels.num_threads()
    results = []
    try:
        for count in counts:
            kernels.set_num_threads(count)
            results.append(compute())
    finally:
        kernels.set_num_threads(before)
    return results
