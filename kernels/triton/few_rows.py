"""Products of few rows of inputs and a dense weight, joined with the operations around them.

A step of up to 16 tokens reads each weight once and computes little, so the time of a layer is that
of reading its weights and of beginning and ending its kernels. These kernels normalize their inputs
themselves, and activate, gate, scale and add to their sums before they write them: a layer of a
Llama-shaped model has three kernels less than with cuBLAS.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.layer_kinds import Activation, NormKind
from kernels.triton.attention_kernels import product
from kernels.triton.dependent import dependent_launch, prefetch, wait_for_inputs
from kernels.triton.launch import launch_table
from kernels.triton.pointwise import activate, gated, with_dense_columns
from kernels.weights import DenseWeight, InputNorm, Weight

__all__ = ["MAX_ROWS", "Epilogue", "are_few_rows", "few_rows_linear", "joins_norm"]

MAX_ROWS = 16
"""Rows of a program's tile, as many as those of a matrix instruction."""
_TYPES = (torch.bfloat16, torch.float16)
_LINE_BYTES = 128
_PREFETCHED = tl.constexpr(8)  # lines of a weight's row
_OFFSET = tl.constexpr(NormKind.OFFSET.value)
_NO_NORM = tl.constexpr(-1)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The operations behind the sums of a product.

    Attributes:
        activation: of the sums, or of the gates.
        is_gated: whether the weight is a gate's above that of the gated values.
        scale: a factor of sums that are not gated.
        residual: `[rows, outputs]`; what is added, whose memory becomes the result's.
    """

    activation: Activation | None = None
    is_gated: bool = False
    scale: float = 1.0
    residual: torch.Tensor | None = None


def are_few_rows(hidden: torch.Tensor, weight: Weight) -> bool:
    """Whether `few_rows_linear` computes a product."""
    return (
        0 < len(hidden) <= MAX_ROWS
        and isinstance(weight, DenseWeight)
        and hidden.dtype in _TYPES
        and weight.data.is_contiguous()
        and launch_table(hidden.device).mechanisms.few_row_products
    )


def joins_norm(hidden: torch.Tensor) -> bool:
    """Whether `few_rows_linear` normalizes these inputs.

    It multiplies them by the norm's weight before it knows their mean, which may exceed the
    largest number of float16.
    """
    return hidden.dtype == torch.bfloat16


def few_rows_linear(
    hidden: torch.Tensor,
    weight: DenseWeight,
    bias: torch.Tensor | None,
    epilogue: Epilogue,
    norm: InputNorm | None = None,
) -> torch.Tensor:
    """Computes `epilogue(norm(hidden) @ weight.T + bias)`.

    Args:
        hidden: `[rows, num_columns]`, up to `MAX_ROWS`.
        weight: the weight.
        bias: `[num_rows]`.
        epilogue: what follows.
        norm: of the inputs.

    Returns:
        `[rows, num_rows]`, or half as many columns if they are gated.
    """
    hidden, residual = with_dense_columns(hidden), epilogue.residual
    num_outputs = weight.num_rows // 2 if epilogue.is_gated else weight.num_rows
    out = residual
    if out is None:
        out = torch.empty((len(hidden), num_outputs), dtype=hidden.dtype, device=hidden.device)
    assert out.stride(1) == 1
    launch = launch_table(hidden.device).few_row_linear.for_size(num_outputs)
    _few_rows_kernel[(triton.cdiv(num_outputs, launch.block_n),)](
        hidden,
        None if norm is None else norm.weight,
        weight.data,
        bias,
        residual,
        out,
        hidden.stride(0),
        out.stride(0),
        len(hidden),
        num_outputs,
        weight.num_columns,
        0.0 if norm is None else norm.eps,
        epilogue.scale,
        NORM=_NO_NORM.value if norm is None else norm.kind.value,
        ACTIVATION=0 if epilogue.activation is None else epilogue.activation.value,
        IS_GATED=epilogue.is_gated,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        LINE=_LINE_BYTES // hidden.element_size(),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **dependent_launch(hidden.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    hidden,
    norm_weight,
    weight,
    bias,
    residual,
    out,
    hidden_stride,
    out_stride,
    num_rows,
    num_outputs,
    num_columns,
    eps,
    scale,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """`out = epilogue(norm(hidden) @ weight.T + bias)`; program i computes block i of the outputs.

    Rows of inputs are multiplied by the norm's weight, and their sums by the norm's factor: it is
    known once all inputs are read.

    LINE: elements of a line of the L2 cache.
    """
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    weight_rows = weight + outputs.to(tl.int64)[:, None] * num_columns
    up_rows = weight + (outputs + num_outputs).to(tl.int64)[:, None] * num_columns
    # The weight's first lines are read while the kernels in front end.
    lines = tl.minimum(tl.arange(0, _PREFETCHED) * LINE, num_columns - 1)
    prefetched = tl.minimum(outputs, num_outputs - 1)
    prefetch(weight + prefetched.to(tl.int64)[:, None] * num_columns + lines, IS_DEPENDENT)
    if IS_GATED:
        prefetched += num_outputs
        prefetch(weight + prefetched.to(tl.int64)[:, None] * num_columns + lines, IS_DEPENDENT)
    wait_for_inputs(IS_DEPENDENT)

    rows = tl.arange(0, BLOCK_M)
    is_row = (rows < num_rows)[:, None]
    input_rows = hidden + rows.to(tl.int64)[:, None] * hidden_stride
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, num_columns, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        is_column = columns < num_columns
        is_element = is_output[:, None] & is_column[None, :]
        inputs = tl.load(input_rows + columns[None, :], mask=is_row & is_column[None, :], other=0.0)
        if NORM != _NO_NORM:
            wide = inputs.to(tl.float32)
            squares += wide * wide
            factors = tl.load(norm_weight + columns, mask=is_column, other=0.0).to(tl.float32)
            if NORM == _OFFSET:
                factors += 1.0
            inputs = (wide * factors[None, :]).to(inputs.dtype)
        matrix = tl.load(weight_rows + columns[None, :], mask=is_element, other=0.0)
        sums = product(inputs, tl.trans(matrix), sums)
        if IS_GATED:
            matrix = tl.load(up_rows + columns[None, :], mask=is_element, other=0.0)
            up_sums = product(inputs, tl.trans(matrix), up_sums)

    if NORM != _NO_NORM:
        factor = tl.rsqrt(tl.sum(squares, 1) / num_columns + eps)[:, None]
        sums *= factor
        up_sums *= factor
    results = _activated(sums, up_sums, bias, outputs, num_outputs, out, ACTIVATION, IS_GATED)
    results *= scale
    places = rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    is_written = is_row & is_output[None, :]
    if residual is not None:
        results += tl.load(residual + places, mask=is_written, other=0.0).to(tl.float32)
    tl.store(out + places, results.to(out.dtype.element_ty), mask=is_written)


@triton.jit
def _activated(
    sums,
    up_sums,
    bias,
    outputs,
    num_outputs,
    like,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Adds biases to sums, and applies activation and gates; `like` has the result's type."""
    is_output = outputs < num_outputs
    if bias is not None:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            up_bias = tl.load(bias + num_outputs + outputs, mask=is_output, other=0.0)
            up_sums += up_bias.to(tl.float32)[None, :]
    if IS_GATED:
        return gated(up_sums, sums, ACTIVATION, like.dtype.element_ty)
    if ACTIVATION != 0:
        return activate(sums.to(like.dtype.element_ty).to(tl.float32), ACTIVATION)
    return sums
