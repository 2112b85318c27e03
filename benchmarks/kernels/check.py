"""Whether kernels gave what the reference gives on the same numbers in float32."""

import math

import torch

from benchmarks.kernels.case import Result

__all__ = ["find_difference"]

_EPS32 = torch.finfo(torch.float32).eps
_NUM_ROUNDINGS = 8
"""Of results and of what is kept on the way in the inputs' type, in units of its precision."""


def find_difference(
    actual: Result, expected: Result, dtype: torch.dtype, num_terms: int
) -> str | None:
    """What is wrong with a result, in words; None if nothing is.

    Floating results may differ by some roundings to their type, and by what float32 sums lose:
    both in proportion to the element and to the root mean square of its neighbours on the last
    axis. Integers must be equal.

    Args:
        actual: tensors as the kernels gave them.
        expected: as many, by the reference.
        dtype: of the inputs.
        num_terms: of the longest sums.
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
