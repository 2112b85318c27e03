"""Linear layers in C++, run as `kernels.native.ops` describes."""

import torch

from kernels import reference
from kernels.dispatch import NATIVE
from kernels.layer_kinds import Activation
from kernels.library import commands
from kernels.native.ops import is_vector, residual_fields, residual_rows, rows_of, run_command
from kernels.native.packed_weight import ELEMENT_TYPES, PackedWeight, PanelWeight
from kernels.native.pointwise import gate_rows, rms_norm
from kernels.weights import InputNorm, SegmentedWeight, Weight, WeightStack, WeightUse

__all__ = ["head_linear", "linear", "linear_gated"]


@NATIVE.implements(reference.linear)
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
    rows = _normed_rows(hidden, norm)
    shape = len(rows), weight.num_rows
    if residual is not None:
        residual = residual_rows(residual, rows.dtype, shape)
    assert bias is None or is_vector(bias, weight.num_rows, rows.dtype)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype or rows.dtype)
    if not isinstance(weight, SegmentedWeight):
        _linear(rows, weight, bias, residual, out, activation, scale, cap)
        return out
    first = 0
    for segment in weight.segments:
        part = slice(first, first + segment.num_rows)
        segment_bias = None if bias is None else bias[part]
        segment_residual = None if residual is None else residual[:, part]
        _linear(rows, segment, segment_bias, segment_residual, out[:, part], activation, scale, cap)
        first += segment.num_rows
    return out


@NATIVE.implements(reference.linear_gated)
def linear_gated(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    activation: Activation,
    *,
    norm: InputNorm | None = None,
) -> torch.Tensor:
    if isinstance(weight, SegmentedWeight):
        gate, up = linear(hidden, weight, bias, norm=norm).chunk(2, dim=1)
        return gate_rows(up, gate, activation)
    rows = _normed_rows(hidden, norm)
    assert bias is None or is_vector(bias, weight.num_rows, rows.dtype)
    out = torch.empty((len(rows), weight.num_rows // 2), dtype=rows.dtype)
    _linear(rows, weight, bias, None, out, activation)
    return out


def _normed_rows(hidden: torch.Tensor, norm: InputNorm | None) -> torch.Tensor:
    if norm is None:
        return rows_of(hidden)
    return rows_of(rms_norm(hidden, norm.weight, norm.eps, kind=norm.kind))


@NATIVE.implements(reference.head_linear)
def head_linear(states: torch.Tensor, weight: WeightStack) -> torch.Tensor:
    assert isinstance(weight.template, PackedWeight)
    assert states.dtype == weight.dtype
    num_tokens, num_heads, width = states.shape
    assert num_heads == weight.num_matrices
    assert width >= weight.num_columns
    if states.stride(2) != 1:
        states = states.contiguous()
    num_copied = width - weight.num_columns
    out = torch.empty(
        (num_tokens, num_heads, weight.rows_per_matrix + num_copied), dtype=states.dtype
    )
    run_command(
        commands.HEAD_LINEAR,
        ELEMENT_TYPES[states.dtype],
        states.data_ptr(),
        *states.stride()[:2],
        num_tokens,
        num_heads,
        weight.num_columns,
        weight.data.data_ptr(),
        weight.data.stride(0) * weight.data.itemsize // 4,
        weight.rows_per_matrix,
        num_copied,
        out.data_ptr(),
        keep=(states, out),
    )
    return out


def _linear(
    rows: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    activation: Activation | None,
    scale: float = 1.0,
    cap: float | None = None,
) -> None:
    """Computes a layer into `out`, whose rows may be apart; arguments are as in `kernels.linear`,
    with neighbouring columns adjacent.
    """
    assert isinstance(weight, PanelWeight)
    assert rows.dtype == weight.dtype
    assert rows.shape[1] == weight.num_columns
    assert out.dtype in (torch.float32, rows.dtype)
    run_command(
        commands.LINEAR,
        ELEMENT_TYPES[rows.dtype],
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        weight.data.data_ptr(),
        out.shape[1],
        0 if bias is None else bias.data_ptr(),
        *residual_fields(residual),
        weight.use is WeightUse.GATED_LINEAR,
        0 if activation is None else activation.value,
        scale,
        cap or 0.0,
        out.data_ptr(),
        out.stride(0),
        out.dtype == torch.float32,
        *weight.form,
        keep=(rows, out),
    )
