"""Products of quantized weights on a GPU: W4A16 and W8A16 in Triton, W8A8 of e4m3 by cuBLAS.

Few rows are multiplied by tiles of the weight that are dequantized in registers, so a step reads
the codes and nothing else. For many rows, the weight is dequantized once and cuBLAS multiplies.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
import triton

from kernels import reference
from kernels.dispatch import TRITON
from kernels.triton.dependent import dependent_launch
from kernels.triton.launch import launch_table
from kernels.triton.pointwise import with_dense_columns
from kernels.triton.quantized_kernels import dequantize_kernel, linear_kernel
from kernels.triton.scaled_weight import CHUNK, ScaledWeight, served_on
from kernels.weights import (
    QuantizedForm,
    ServedFormats,
    TensorWeight,
    Weight,
    WeightStack,
    WeightUse,
)

__all__ = [
    "dequantized",
    "embed",
    "embed_part",
    "layout_arguments",
    "make_weight",
    "make_weight_stack",
    "quantized_product",
    "served_formats",
]

MAX_FEW_ROWS = 64
"""Beyond them the weight is dequantized once; every tile of rows would dequantize it again."""
_MAX_FLOAT8 = 448.0
_FLOAT8_MULTIPLE = 16  # of both sizes of a matrix that cuBLAS multiplies


@TRITON.implements(reference.served_formats)
def served_formats(device: torch.device, dtype: torch.dtype) -> ServedFormats:
    return served_on(device)


@TRITON.implements(reference.make_weight)
def make_weight(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    use: WeightUse,
    form: QuantizedForm | None = None,
) -> TensorWeight:
    if form is None:
        return reference.make_weight(num_rows, num_columns, dtype, device, use)
    data = torch.empty(0, dtype=torch.uint8, device=device)
    weight = ScaledWeight(num_rows, num_columns, use, data, form, dtype)
    return replace(weight, data=data.new_zeros(num_rows, weight.layout.row_bytes))


@TRITON.implements(reference.make_weight_stack)
def make_weight_stack(
    num_matrices: int,
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    use: WeightUse,
    form: QuantizedForm | None = None,
) -> WeightStack:
    shape = num_matrices, num_rows, num_columns
    if form is None:
        return reference.make_weight_stack(*shape, dtype, device, use)
    none = torch.empty(0, dtype=torch.uint8, device=device)
    template = ScaledWeight(num_rows, num_columns, use, none, form, dtype)
    data = none.new_zeros(num_matrices, num_rows, template.layout.row_bytes)
    return WeightStack(num_matrices * num_rows, num_columns, use, data, num_matrices, template)


@TRITON.implements(reference.embed)
def embed(
    token_ids: torch.Tensor,
    weight: Weight,
    *,
    scale: float = 1.0,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    if not isinstance(weight, ScaledWeight):
        return reference.embed(token_ids, weight, scale=scale, addend=addend)
    rows = dequantized(weight, token_ids)
    if scale != 1.0:
        rows *= scale
    return rows if addend is None else rows.add_(addend)


@TRITON.implements(reference.embed_part)
def embed_part(token_ids: torch.Tensor, weight: Weight, first_id: int) -> torch.Tensor:
    if not isinstance(weight, ScaledWeight):
        return reference.embed_part(token_ids, weight, first_id)
    rows = token_ids - first_id
    has_row = (rows >= 0) & (rows < weight.num_rows)
    return torch.where(has_row.unsqueeze(-1), dequantized(weight, rows * has_row).float(), 0.0)


def quantized_product(
    hidden: torch.Tensor, weight: ScaledWeight, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns `hidden @ weight.T`, rounded once.

    Args:
        hidden: `[rows, num_columns]`.
        weight: the weight.
        out_dtype: of the result; None for that of `hidden`.
    """
    out_dtype = out_dtype or hidden.dtype
    if not weight.quantized.is_exact:
        return _float8_product(hidden, weight, out_dtype)
    if len(hidden) > MAX_FEW_ROWS:
        matrix = dequantized(weight)
        if out_dtype == hidden.dtype:
            return F.linear(hidden, matrix)
        if hidden.is_cuda:
            return torch.mm(hidden, matrix.t(), out_dtype=out_dtype)
        return hidden.to(out_dtype) @ matrix.t().to(out_dtype)  # torch has none on the CPU
    return _few_rows(hidden, weight, out_dtype)


def _few_rows(hidden: torch.Tensor, weight: ScaledWeight, out_dtype: torch.dtype) -> torch.Tensor:
    hidden = with_dense_columns(hidden)
    num_rows = len(hidden)
    out = torch.empty((num_rows, weight.num_rows), dtype=out_dtype, device=hidden.device)
    if not num_rows:
        return out
    launch = launch_table(hidden.device).quantized_linear.for_size(num_rows)
    grid = (triton.cdiv(weight.num_rows, launch.block_n), triton.cdiv(num_rows, launch.block_m))
    linear_kernel[grid](
        hidden,
        weight.data,
        out,
        hidden.stride(0),
        num_rows,
        weight.num_rows,
        weight.num_columns,
        **layout_arguments(weight),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **dependent_launch(hidden.device),
    )
    return out


def _float8_product(
    hidden: torch.Tensor, weight: ScaledWeight, out_dtype: torch.dtype
) -> torch.Tensor:
    """Rounds each row of inputs to e4m3 with one scale, and multiplies e4m3 by e4m3."""
    numbers = hidden.float()
    scales = numbers.abs().amax(dim=1, keepdim=True) / _MAX_FLOAT8
    scales = torch.where(scales > 0, scales, 1.0)
    rounded = (numbers / scales).to(torch.float8_e4m3fn)
    if weight.num_rows % _FLOAT8_MULTIPLE or weight.num_columns % _FLOAT8_MULTIPLE:
        # The same products, whose sums are rounded in another order.
        sums = _few_rows(rounded.to(hidden.dtype), weight, torch.float32)
        return (sums * scales).to(out_dtype)
    layout = weight.layout
    codes = weight.data[:, : weight.num_columns].view(torch.float8_e4m3fn)
    scales_at = slice(layout.code_bytes, layout.code_bytes + 4)
    weight_scales = weight.data[:, scales_at].contiguous().view(torch.float32)
    one = torch.ones((), dtype=torch.float32, device=hidden.device)
    # Scales of rows are applied here: torch's own form of them takes contiguous matrices alone.
    sums = torch._scaled_mm(rounded, codes.t(), one, one, out_dtype=torch.float32)
    return (sums * scales * weight_scales.t()).to(out_dtype)


def dequantized(weight: ScaledWeight, row_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Returns rows of a weight as numbers, `[rows, num_columns]` of its type.

    Args:
        weight: the weight.
        row_ids: `[rows]` int64 numbers of the rows; None for all.
    """
    num_rows = weight.num_rows if row_ids is None else len(row_ids)
    shape = num_rows, weight.num_columns
    out = torch.empty(shape, dtype=weight.computed_in, device=weight.data.device)
    if num_rows:
        launch = launch_table(out.device).quantized_linear.for_size(num_rows)
        grid = (triton.cdiv(num_rows, launch.block_n), triton.cdiv(weight.num_columns, CHUNK))
        dequantize_kernel[grid](
            weight.data,
            row_ids,
            out,
            num_rows,
            weight.num_columns,
            **layout_arguments(weight),
            BLOCK_N=launch.block_n,
            num_warps=launch.num_warps,
        )
    return out


def layout_arguments(weight: ScaledWeight) -> dict[str, int | bool]:
    """Returns the arguments of kernels that describe a weight's rows."""
    layout = weight.layout
    return {
        "row_bytes": layout.row_bytes,
        "scales_at": layout.code_bytes,
        "zeros_at": layout.zeros_at,
        "offsets_at": layout.offsets_at,
        "KIND": layout.kind.value,
        "RUN": layout.run,
        "HAS_ZEROS": layout.has_zeros,
        "HAS_OFFSETS": layout.has_offsets,
    }
