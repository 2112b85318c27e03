"""Linear layers on a GPU: cuBLAS multiplies, Triton does what follows."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from kernels.triton.pointwise import silu_and_mul
from kernels.weights import DenseWeight, Weight

__all__ = ["linear", "linear_silu_and_mul"]


def linear(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `reference.linear`; the result may lie in `residual`'s memory, rounded once."""
    matrix = _dense(weight)
    if out_dtype not in (None, hidden.dtype):
        return _linear_into(out_dtype, hidden, matrix, bias, residual)
    if residual is None:
        return F.linear(hidden, matrix, bias)
    if bias is not None:
        residual.add_(bias)
    return residual.addmm_(hidden, matrix.t())


def linear_silu_and_mul(
    hidden: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See `reference.linear_silu_and_mul`."""
    return silu_and_mul(F.linear(hidden, _dense(weight), bias))


def _linear_into(
    out_dtype: torch.dtype,
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Sums in another type than the inputs', never rounded to theirs."""
    if hidden.is_cuda:
        out = torch.mm(hidden, matrix.t(), out_dtype=out_dtype)
    else:  # where torch has no such product
        out = hidden.to(out_dtype) @ matrix.t().to(out_dtype)
    for addend in (bias, residual):
        if addend is not None:
            out += addend
    return out


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, DenseWeight)
    return weight.data
