"""Linear layers on a GPU: cuBLAS for products, Triton for the gate of an MLP."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.triton.launch import launch_table
from kernels.triton.pointwise import with_dense_columns
from kernels.weights import DenseWeight, Weight

__all__ = ["linear", "linear_silu_and_mul", "silu_and_mul"]


@TRITON.implements(reference.linear)
def linear(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Adds into the memory of `residual`, if there is one, and rounds the sum once."""
    matrix = _dense(weight)
    if out_dtype not in (None, hidden.dtype):
        return _linear_into(out_dtype, hidden, matrix, bias, residual)
    if residual is None:
        return F.linear(hidden, matrix, bias)
    if bias is not None:
        residual.add_(bias)
    return residual.addmm_(hidden, matrix.t())


@TRITON.implements(reference.linear_silu_and_mul)
def linear_silu_and_mul(
    hidden: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return silu_and_mul(F.linear(hidden, _dense(weight), bias))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes `silu(gate) * up` of adjacent gate and up: `[rows, 2 * size] -> [rows, size]`.

    Args:
        gate_up: contiguous rows at any distance.
    """
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = with_dense_columns(gate_up)
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    launch = launch_table(gate_up.device).pointwise.for_size(size)
    _silu_and_mul_kernel[(num_rows, triton.cdiv(size, launch.block_size))](
        gate_up,
        out,
        gate_up.stride(0),
        size,
        BLOCK=launch.block_size,
        num_warps=launch.num_warps,
    )
    return out


@triton.jit
def _silu_and_mul_kernel(gate_up, out, row_stride, size, BLOCK: tl.constexpr):
    """`out = gate * sigmoid(gate) * up`; program (i, j) computes block j of row i."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    start = gate_up + row * row_stride
    gate = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + size + columns, mask=mask, other=0.0).to(tl.float32)
    power = tl.exp(-tl.abs(gate))  # never overflows
    sigmoid = tl.where(gate < 0, power, 1.0) / (1.0 + power)
    tl.store(out + row * size + columns, (gate * sigmoid * up).to(out.dtype.element_ty), mask=mask)


def _linear_into(
    out_dtype: torch.dtype,
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Computes sums in `out_dtype` without rounding them to the inputs' type."""
    if hidden.is_cuda:
        out = torch.mm(hidden, matrix.t(), out_dtype=out_dtype)
    else:  # torch has no such product on the CPU
        out = hidden.to(out_dtype) @ matrix.t().to(out_dtype)
    for addend in (bias, residual):
        if addend is not None:
            out += addend
    return out


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, DenseWeight)
    return weight.data
