"""Linear layers and embeddings, in plain torch."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from kernels.dispatch import kernel
from kernels.weights import DenseWeight, Weight, WeightUse

__all__ = [
    "embed",
    "embed_part",
    "linear",
    "linear_silu_and_mul",
    "make_weight",
    "silu_and_mul",
    "take_rows",
]


@kernel("device", "dtype")
def make_weight(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    use: WeightUse,
) -> Weight:
    """Allocates a weight, to be filled through `Weight.rows`.

    Args:
        num_rows: outputs.
        num_columns: inputs.
        dtype: of the elements.
        device: that holds the weight.
        use: the kernel that reads it.
    """
    data = torch.empty((num_rows, num_columns), dtype=dtype, device=device)
    return DenseWeight(num_rows, num_columns, use, data)


@kernel("weight.data.device", "weight.data.dtype")
def embed(token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Looks up rows of an embedding: `[num_tokens]` int64 to `[num_tokens, num_columns]`."""
    return F.embedding(token_ids, _dense(weight))


@kernel("weight.data.device", "weight.data.dtype")
def embed_part(token_ids: torch.Tensor, weight: Weight, first_id: int) -> torch.Tensor:
    """Looks up rows of a part of an embedding, in float32; other tokens get zeros.

    Args:
        token_ids: `[num_tokens]` int64.
        weight: the embedding of `weight.num_rows` tokens.
        first_id: id of the first of these tokens.

    Returns:
        `[num_tokens, num_columns]` float32.
    """
    rows = token_ids - first_id
    has_row = (rows >= 0) & (rows < weight.num_rows)
    embedded = F.embedding(rows * has_row, _dense(weight)).float()
    return torch.where(has_row.unsqueeze(-1), embedded, 0.0)


@kernel("matrix.device", "matrix.dtype")
def take_rows(
    matrix: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copies rows of a matrix: `matrix[rows]`.

    Args:
        matrix: `[num_rows, num_columns]`, any strides.
        rows: `[n]` int64.
        out: `[n, num_columns]`, contiguous, of the matrix's type; memory for the result, which
            the caller owns.

    Returns:
        `[n, num_columns]`, contiguous.
    """
    taken = matrix.index_select(0, rows)
    return taken if out is None else out.copy_(taken)


@kernel("weight.data.device", "weight.data.dtype")
def linear(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes `hidden @ weight.T + bias + residual`.

    Args:
        hidden: `[rows, num_columns]`.
        weight: made for `WeightUse.LINEAR`.
        bias: `[num_rows]`.
        residual: `[rows, num_rows]`, which must not overlap `hidden`; its memory may be reused for
            the result.
        out_dtype: of the result; None for that of `hidden`.

    Returns:
        `[rows, num_rows]`.
    """
    out = F.linear(hidden, _dense(weight), bias)
    if residual is not None:
        out = residual + out
    return out if out_dtype is None else out.to(out_dtype)


@kernel("weight.data.device", "weight.data.dtype")
def linear_silu_and_mul(
    hidden: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes `silu(hidden @ gate.T) * (hidden @ up.T)`.

    Args:
        hidden: `[rows, num_columns]`.
        weight: made for `WeightUse.GATED_LINEAR`: `gate` above `up`.
        bias: `[num_rows]`, the gate's above that of `up`.

    Returns:
        `[rows, num_rows / 2]`.
    """
    return silu_and_mul(F.linear(hidden, _dense(weight), bias))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes `silu(gate) * up` of adjacent gate and up: `[..., 2 * size] -> [..., size]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, DenseWeight)
    return weight.data
