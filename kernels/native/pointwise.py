"""Operations on rows of hidden states in C++: norms and gates.

They run as `kernels.native.ops` describes.
"""

import torch

from kernels import reference
from kernels.dispatch import NATIVE
from kernels.layer_kinds import Activation, NormKind
from kernels.library import commands
from kernels.native.ops import is_vector, residual_fields, residual_rows, rows_of, run_command
from kernels.native.packed_weight import ELEMENT_TYPES

__all__ = ["gate_rows", "layer_norm", "rms_norm"]


@NATIVE.implements(reference.gate_rows)
def gate_rows(
    values: torch.Tensor, gates: torch.Tensor, activation: Activation | None
) -> torch.Tensor:
    assert values.shape == gates.shape
    assert values.dtype == gates.dtype
    values, gates = rows_of(values), rows_of(gates)
    out = torch.empty(values.shape, dtype=values.dtype)
    run_command(
        commands.GATE_ROWS,
        ELEMENT_TYPES[values.dtype],
        values.data_ptr(),
        values.stride(0),
        gates.data_ptr(),
        gates.stride(0),
        *values.shape,
        0 if activation is None else activation.value,
        out.data_ptr(),
        keep=(values, gates, out),
    )
    return out


@NATIVE.implements(reference.rms_norm)
def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    kind: NormKind = NormKind.ROUNDED,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    assert is_vector(weight, hidden.shape[-1], hidden.dtype)
    rows, residual, out = _operands(hidden, residual)
    run_command(
        commands.RMS_NORM,
        ELEMENT_TYPES[hidden.dtype],
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        weight.data_ptr(),
        eps,
        kind.value,
        *residual_fields(residual),
        out.data_ptr(),
        keep=(rows, out),
    )
    return out


@NATIVE.implements(reference.layer_norm)
def layer_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    for vector in (weight, bias):
        assert vector is None or is_vector(vector, hidden.shape[-1], hidden.dtype)
    rows, residual, out = _operands(hidden, residual)
    run_command(
        commands.LAYER_NORM,
        ELEMENT_TYPES[hidden.dtype],
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        eps,
        *residual_fields(residual),
        out.data_ptr(),
        keep=(rows, out),
    )
    return out


def _operands(
    hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Returns the rows of a norm, those of its residual, and memory for the result."""
    rows = rows_of(hidden.flatten(0, -2))
    if residual is not None:
        residual = residual_rows(residual.flatten(0, -2), rows.dtype, rows.shape)
    return rows, residual, torch.empty(hidden.shape, dtype=hidden.dtype)
