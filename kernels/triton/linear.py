"""Linear layers on a GPU: cuBLAS for products, Triton for what is before and behind them; and
Triton for all of it where there are few rows.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.layer_kinds import Activation
from kernels.triton.dependent import dependent_launch, wait_for_inputs
from kernels.triton.few_rows import Epilogue, are_few_rows, few_rows_linear, joins_norm
from kernels.triton.launch import launch_table
from kernels.triton.pointwise import activate, gate_rows, rms_norm
from kernels.triton.quantized import quantized_product
from kernels.triton.scaled_weight import ScaledWeight
from kernels.weights import DenseWeight, InputNorm, SegmentedWeight, Weight, WeightStack

__all__ = ["head_linear", "linear", "linear_gated"]

# Otherwise cuBLAS may divide a sum among programs, and round each part to the type of the inputs.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@TRITON.implements(reference.linear)
def linear(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    norm: InputNorm | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds into the memory of `residual`, if there is one.

    The sum is rounded once, unless there is an activation or a cap.
    """
    is_plain = cap is None and out is None and out_dtype in (None, hidden.dtype)
    if is_plain and are_few_rows(hidden, weight):
        epilogue = Epilogue(activation, scale=scale, residual=residual)
        return _few_rows(hidden, weight, bias, epilogue, norm)
    hidden = _normed(hidden, norm)
    if activation is not None or cap is not None:
        result = linear(hidden, weight, bias, out_dtype=out_dtype, out=out)
        _finish(result, activation, scale, cap)
        return result if residual is None else result.add_(residual)
    if not isinstance(weight, DenseWeight):
        result = _linear_in_parts(hidden, weight, bias, residual, out_dtype or hidden.dtype, scale)
        return result if out is None else out.copy_(result)
    matrix = weight.data
    if out is not None or out_dtype not in (None, hidden.dtype):
        return _linear_into(out, out_dtype or hidden.dtype, hidden, matrix, bias, residual, scale)
    if residual is None:
        result = F.linear(hidden, matrix, bias)
        return result if scale == 1.0 else result.mul_(scale)
    if bias is not None:
        residual.add_(bias, alpha=scale)
    return residual.addmm_(hidden, matrix.t(), alpha=scale)


@TRITON.implements(reference.linear_gated)
def linear_gated(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    activation: Activation,
    *,
    norm: InputNorm | None = None,
) -> torch.Tensor:
    if are_few_rows(hidden, weight):
        return _few_rows(hidden, weight, bias, Epilogue(activation, is_gated=True), norm)
    gate, up = linear(hidden, weight, bias, norm=norm).chunk(2, dim=-1)
    return gate_rows(up, gate, activation)


def _few_rows(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    epilogue: Epilogue,
    norm: InputNorm | None,
) -> torch.Tensor:
    assert isinstance(weight, DenseWeight)
    if norm is not None and not joins_norm(hidden):
        hidden, norm = _normed(hidden, norm), None
    return few_rows_linear(hidden, weight, bias, epilogue, norm)


def _normed(hidden: torch.Tensor, norm: InputNorm | None) -> torch.Tensor:
    if norm is None:
        return hidden
    return rms_norm(hidden, norm.weight, norm.eps, kind=norm.kind)


@TRITON.implements(reference.head_linear)
def head_linear(states: torch.Tensor, weight: WeightStack) -> torch.Tensor:
    """Multiplies into the memory of the result."""
    num_tokens, num_heads, width = states.shape
    num_columns, num_rows = weight.num_columns, weight.rows_per_matrix
    out = states.new_empty(num_tokens, num_heads, num_rows + width - num_columns)
    by_head = states[..., :num_columns].transpose(0, 1)
    torch.bmm(by_head, weight.data.transpose(1, 2), out=out[..., :num_rows].transpose(0, 1))
    if width > num_columns:
        out[..., num_rows:] = states[..., num_columns:]
    return out


def _finish(
    sums: torch.Tensor, activation: Activation | None, scale: float, cap: float | None
) -> None:
    """Replaces contiguous sums by `cap(scale * activation(sums))`."""
    launch = launch_table(sums.device).pointwise.for_size(sums.numel())
    _finish_kernel[(triton.cdiv(sums.numel(), launch.block_size),)](
        sums,
        sums.numel(),
        scale,
        1.0 if cap is None else cap,
        ACTIVATION=0 if activation is None else activation.value,
        HAS_CAP=cap is not None,
        BLOCK=launch.block_size,
        num_warps=launch.num_warps,
        **dependent_launch(sums.device),
    )


@triton.jit(do_not_specialize=["size"])  # or each number of rows might compile it again
def _finish_kernel(
    sums,
    size,
    scale,
    cap,
    ACTIVATION: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """`sums = cap(scale * activation(sums))`; program i computes block i."""
    wait_for_inputs(IS_DEPENDENT)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    values = tl.load(sums + offsets, mask=mask, other=0.0).to(tl.float32)
    values = activate(values, ACTIVATION) * scale
    if HAS_CAP:
        # tanh(|x|) = (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)), and nothing overflows.
        power = tl.exp(-2.0 * tl.abs(values) / cap)
        capped = cap * ((1.0 - power) / (1.0 + power))
        values = tl.where(values < 0.0, -capped, capped)
    tl.store(sums + offsets, values.to(sums.dtype.element_ty), mask=mask)


def _linear_into(
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Computes sums in `out_dtype`, in `out` if there is one, without rounding them to the
    inputs' type.
    """
    if out is None:
        out = hidden.new_empty((len(hidden), len(matrix)), dtype=out_dtype)
    if out_dtype == hidden.dtype:
        torch.mm(hidden, matrix.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, matrix.t(), out_dtype=out_dtype, out=out)
    else:  # torch has no such product on the CPU
        torch.mm(hidden.to(out_dtype), matrix.t().to(out_dtype), out=out)
    if bias is not None:
        out += bias
    if scale != 1.0:
        out *= scale
    if residual is not None:
        out += residual
    return out


def _linear_in_parts(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    scale: float,
) -> torch.Tensor:
    """Computes products of a weight that is no dense matrix; sums are rounded once."""
    if bias is None and residual is None and scale == 1.0:
        return _product(hidden, weight, out_dtype)
    sums = _product(hidden, weight, torch.float32)
    if bias is not None:
        sums += bias
    if scale != 1.0:
        sums *= scale
    if residual is not None:
        sums += residual
    return sums.to(out_dtype)


def _product(hidden: torch.Tensor, weight: Weight, out_dtype: torch.dtype) -> torch.Tensor:
    if isinstance(weight, SegmentedWeight):
        return torch.cat([_product(hidden, part, out_dtype) for part in weight.segments], dim=1)
    if isinstance(weight, ScaledWeight):
        return quantized_product(hidden, weight, out_dtype)
    assert isinstance(weight, DenseWeight)
    return linear(hidden, weight, out_dtype=out_dtype)
