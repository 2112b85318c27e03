"""Norms, gates, rotary angles and maxima, in Triton."""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.layer_kinds import CLAMP_LIMIT, CLAMP_SLOPE, Activation, NormKind
from kernels.paged_kv import Rotation
from kernels.triton.dependent import dependent_launch, wait_for_inputs
from kernels.triton.launch import launch_table

__all__ = [
    "activate",
    "gate_rows",
    "layer_norm",
    "rms_norm",
    "rotary_angles",
    "row_maxima",
    "times_weight",
    "with_dense_columns",
]

_WIDE, _OFFSET = tl.constexpr(NormKind.WIDE.value), tl.constexpr(NormKind.OFFSET.value)
_SILU, _GELU = tl.constexpr(Activation.SILU.value), tl.constexpr(Activation.GELU.value)
_GELU_TANH = tl.constexpr(Activation.GELU_TANH.value)
_RELU, _SIGMOID = tl.constexpr(Activation.RELU.value), tl.constexpr(Activation.SIGMOID.value)
_CLAMPED_SILU = tl.constexpr(Activation.CLAMPED_SILU.value)
_LIMIT, _SLOPE = tl.constexpr(CLAMP_LIMIT), tl.constexpr(CLAMP_SLOPE)


@TRITON.implements(reference.rms_norm)
def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    kind: NormKind = NormKind.ROUNDED,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    size = hidden.shape[-1]
    rows, residual, out = _operands(hidden, residual)
    launch = launch_table(hidden.device).row_norm.for_size(size)
    _rms_norm_kernel[(len(rows),)](
        rows,
        weight.contiguous(),
        residual,
        out,
        rows.stride(0),
        0 if residual is None else residual.stride(0),
        size,
        eps,
        KIND=kind.value,
        BLOCK=triton.next_power_of_2(size),
        num_warps=launch.num_warps,
        **dependent_launch(hidden.device),
    )
    return out


@triton.jit
def _rms_norm_kernel(
    hidden,
    weight,
    residual,
    out,
    row_stride,
    residual_stride,
    size,
    eps,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """`out = hidden / sqrt(mean(hidden^2) + eps) * weight + residual`; program i computes row i."""
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    wide = tl.load(hidden + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / size + eps)
    normed = times_weight(wide, scale, out, KIND).to(out.dtype.element_ty)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
        normed = normed.to(tl.float32) + added.to(tl.float32)
    tl.store(out + row * size + columns, normed.to(out.dtype.element_ty), mask=mask)


@TRITON.implements(reference.layer_norm)
def layer_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    size = hidden.shape[-1]
    rows, residual, out = _operands(hidden, residual)
    launch = launch_table(hidden.device).row_norm.for_size(size)
    _layer_norm_kernel[(len(rows),)](
        rows,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        residual,
        out,
        rows.stride(0),
        0 if residual is None else residual.stride(0),
        size,
        eps,
        BLOCK=triton.next_power_of_2(size),
        num_warps=launch.num_warps,
        **dependent_launch(hidden.device),
    )
    return out


@triton.jit
def _layer_norm_kernel(
    hidden,
    weight,
    bias,
    residual,
    out,
    row_stride,
    residual_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """`out = (hidden - mean) / sqrt(variance + eps) * weight + bias + residual`, by row."""
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    wide = tl.load(hidden + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    wide = tl.where(mask, wide - tl.sum(wide) / size, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / size + eps)
    if weight is not None:
        wide *= tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        wide += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    normed = wide.to(out.dtype.element_ty)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
        normed = normed.to(tl.float32) + added.to(tl.float32)
    tl.store(out + row * size + columns, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def times_weight(normed, weight, like, KIND: tl.constexpr):
    """Multiplies normalized values by a norm's weight, all float32; see `NormKind`.

    They are rounded to the type that `like` points to if the norm's kind says so.
    """
    if KIND == _WIDE:
        return normed * weight
    if KIND == _OFFSET:
        return normed * (1.0 + weight)
    return normed.to(like.dtype.element_ty).to(tl.float32) * weight


@TRITON.implements(reference.gate_rows)
def gate_rows(
    values: torch.Tensor, gates: torch.Tensor, activation: Activation | None
) -> torch.Tensor:
    assert values.shape == gates.shape
    num_rows, size = values.shape
    values, gates = with_dense_columns(values), with_dense_columns(gates)
    out = torch.empty((num_rows, size), dtype=values.dtype, device=values.device)
    launch = launch_table(values.device).pointwise.for_size(size)
    _gate_rows_kernel[(num_rows, triton.cdiv(size, launch.block_size))](
        values,
        gates,
        out,
        values.stride(0),
        gates.stride(0),
        size,
        ACTIVATION=0 if activation is None else activation.value,
        BLOCK=launch.block_size,
        num_warps=launch.num_warps,
        **dependent_launch(values.device),
    )
    return out


@triton.jit
def _gate_rows_kernel(
    values,
    gates,
    out,
    value_stride,
    gate_stride,
    size,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """`out = values * activation(gates)`; program (i, j) computes block j of row i."""
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gates + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(values + row * value_stride + columns, mask=mask, other=0.0).to(tl.float32)
    product = gated(value, gate, ACTIVATION, out.dtype.element_ty)
    tl.store(out + row * size + columns, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated(values, gates, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Multiplies float32 values of type DTYPE by the activation of their gates."""
    if ACTIVATION == _CLAMPED_SILU:
        values = tl.where(values > _LIMIT, _LIMIT, tl.where(values < -_LIMIT, -_LIMIT, values))
        values = (values + 1.0).to(DTYPE).to(tl.float32)
    return activate(gates, ACTIVATION) * values


@triton.jit
def activate(values, ACTIVATION: tl.constexpr):
    """Applies an `Activation` to float32 numbers; they are unchanged for 0."""
    if ACTIVATION == _SILU:
        return values * _sigmoid(values)
    if ACTIVATION == _GELU:
        return values * 0.5 * (1.0 + tl.erf(values * 0.7071067811865476))
    if ACTIVATION == _GELU_TANH:  # (1 + tanh(u)) / 2 = sigmoid(2u)
        cubic = 0.044715 * values * values * values
        return values * _sigmoid(1.5957691216057308 * (values + cubic))
    if ACTIVATION == _RELU:
        return tl.where(values < 0.0, 0.0, values)
    if ACTIVATION == _SIGMOID:
        return _sigmoid(values)
    if ACTIVATION == _CLAMPED_SILU:
        clamped = tl.where(values > _LIMIT, _LIMIT, values)  # NaN stays
        return clamped * _sigmoid(clamped * _SLOPE)
    return values


@triton.jit
def _sigmoid(values):
    power = tl.exp(-tl.abs(values))  # never overflows
    return tl.where(values < 0, power, 1.0) / (1.0 + power)


@TRITON.implements(reference.rotary_angles)
def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float) -> Rotation:
    shape = len(positions), len(frequencies)
    cos, sin = torch.empty((2, *shape), dtype=torch.float32, device=positions.device).unbind()
    num_angles = cos.numel()
    launch = launch_table(positions.device).pointwise.for_size(num_angles)
    _rotary_angles_kernel[(triton.cdiv(num_angles, launch.block_size),)](
        positions,
        frequencies.contiguous(),
        cos,
        sin,
        positions.stride(0),
        len(frequencies),
        num_angles,
        amplitude,
        BLOCK=launch.block_size,
        num_warps=launch.num_warps,
    )
    return Rotation(cos, sin)


@triton.jit
def _rotary_angles_kernel(
    positions,
    frequencies,
    cos,
    sin,
    position_stride,
    num_frequencies,
    num_angles,
    amplitude,
    BLOCK: tl.constexpr,
):
    """`cos = cos(position * frequency) * amplitude`, `sin` likewise; program i: block i of both."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_angles
    tokens = offsets // num_frequencies
    position = tl.load(positions + tokens * position_stride, mask=mask, other=0)
    frequency = tl.load(frequencies + offsets % num_frequencies, mask=mask, other=0.0)
    angle = position.to(tl.float32) * frequency
    tl.store(cos + offsets, tl.cos(angle) * amplitude, mask=mask)
    tl.store(sin + offsets, tl.sin(angle) * amplitude, mask=mask)


@TRITON.implements(reference.row_maxima)
def row_maxima(
    logits: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expects contiguous tensors in `out`."""
    num_rows, size = logits.shape
    if out is None:
        maxima = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        out = maxima, torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    assert all(tensor.is_contiguous() and len(tensor) == num_rows for tensor in out)
    launch = launch_table(logits.device).row_maxima.for_size(size)
    num_parts = triton.cdiv(size, launch.block_size)
    maxima = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    indices = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    _part_maxima_kernel[(num_rows, num_parts)](
        logits,
        maxima,
        indices,
        *logits.stride(),
        size,
        BLOCK=launch.block_size,
        num_warps=launch.num_warps,
    )
    _join_maxima_kernel[(num_rows,)](
        maxima, indices, *out, num_parts, BLOCK=triton.next_power_of_2(num_parts), num_warps=1
    )
    return out


@triton.jit
def _part_maxima_kernel(
    logits, maxima, indices, row_stride, column_stride, size, BLOCK: tl.constexpr
):
    """Each part's largest value and its first index; program (i, j): part j of row i."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    places = logits + row * row_stride + columns.to(tl.int64) * column_stride
    values = tl.load(places, mask=columns < size, other=float("-inf"))
    maximum, index = _maximum(values, columns)
    place = row * tl.num_programs(1) + part
    tl.store(maxima + place, maximum)
    tl.store(indices + place, index)


@triton.jit
def _join_maxima_kernel(maxima, indices, maximum_out, index_out, num_parts, BLOCK: tl.constexpr):
    """A row's largest value and its first index from those of its parts; program i: row i."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    mask = parts < num_parts
    values = tl.load(maxima + row * num_parts + parts, mask=mask, other=float("-inf"))
    columns = tl.load(indices + row * num_parts + parts, mask=mask, other=2147483647)
    maximum, index = _maximum(values, columns)
    is_finite = tl.abs(maximum) < float("inf")  # NaN is not
    tl.store(maximum_out + row, maximum)
    tl.store(index_out + row, tl.where(is_finite, index, -1).to(tl.int64))


@triton.jit
def _maximum(values, columns):
    """Returns the largest of `values`, NaN if one is, and the least of `columns` that holds it."""
    is_nan = values != values
    maximum = tl.max(tl.where(is_nan, float("-inf"), values))
    index = tl.min(tl.where(values == maximum, columns, 2147483647))
    has_nan = tl.max(is_nan.to(tl.int32)) > 0
    return tl.where(has_nan, float("nan"), maximum), index


def _operands(
    hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Returns the rows of a norm, those of its residual, and memory for the result."""
    rows = with_dense_columns(hidden.flatten(0, -2))
    if residual is not None:
        assert residual.shape == hidden.shape
        residual = with_dense_columns(residual.flatten(0, -2))
    return rows, residual, torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)


def with_dense_columns(rows: torch.Tensor) -> torch.Tensor:
    """Returns `rows`, `[..., columns]`, copied if neighbouring columns are not adjacent."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
