"""Linear layers and embeddings, in plain torch."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from kernels.dispatch import kernel
from kernels.layer_kinds import Activation
from kernels.reference.pointwise import activate, gate_rows, rms_norm
from kernels.weights import (
    DenseWeight,
    InputNorm,
    QuantizedForm,
    ServedFormats,
    TensorWeight,
    Weight,
    WeightStack,
    WeightUse,
)

__all__ = [
    "embed",
    "embed_part",
    "head_linear",
    "linear",
    "linear_gated",
    "make_weight",
    "make_weight_stack",
    "served_formats",
    "take_rows",
]


@kernel("device", "dtype")
def served_formats(device: torch.device, dtype: torch.dtype) -> ServedFormats:
    """Returns the storage formats in which weights can be kept and multiplied.

    Args:
        device: that holds the weights.
        dtype: of inputs and results.
    """
    return ServedFormats(frozenset(), frozenset())


@kernel("device", "dtype")
def make_weight(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    use: WeightUse,
    form: QuantizedForm | None = None,
) -> TensorWeight:
    """Allocates a weight, to be filled through `Weight.rows`.

    Args:
        num_rows: outputs.
        num_columns: inputs.
        dtype: of inputs and results, and of the elements of a dense weight.
        device: that holds the weight.
        use: the kernel that reads it.
        form: one that `served_formats` has; None for a dense weight.
    """
    assert form is None, "there are no quantized weights for this device and type"
    data = torch.empty((num_rows, num_columns), dtype=dtype, device=device)
    return DenseWeight(num_rows, num_columns, use, data)


@kernel("device", "dtype")
def make_weight_stack(
    num_matrices: int,
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    use: WeightUse,
    form: QuantizedForm | None = None,
) -> WeightStack:
    """Allocates several matrices, to be filled through `WeightStack.rows`.

    Args:
        num_matrices: number of matrices.
        num_rows: outputs of each matrix.
        num_columns: inputs of each matrix.
        dtype: as in `make_weight`.
        device: that holds the weight.
        use: LINEAR or GATED_LINEAR.
        form: as in `make_weight`.
    """
    assert form is None, "there are no quantized weights for this device and type"
    template = DenseWeight(num_rows, num_columns, use, torch.empty(0, dtype=dtype, device=device))
    data = torch.empty((num_matrices, num_rows, num_columns), dtype=dtype, device=device)
    return WeightStack(num_matrices * num_rows, num_columns, use, data, num_matrices, template)


@kernel("weight.device", "weight.dtype")
def embed(
    token_ids: torch.Tensor,
    weight: Weight,
    *,
    scale: float = 1.0,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """Looks up rows of an embedding, and computes `rows * scale + addend`.

    Args:
        token_ids: `[num_tokens]` int64.
        weight: the embedding.
        scale: factor, whose product is rounded.
        addend: `[num_tokens, num_columns]` of the weight's type.

    Returns:
        `[num_tokens, num_columns]`.
    """
    embedded = F.embedding(token_ids, _dense(weight))
    if scale != 1.0:
        embedded = embedded * scale
    return embedded if addend is None else embedded + addend


@kernel("weight.device", "weight.dtype")
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


@kernel("weight.device", "weight.dtype")
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
    """Computes `cap(scale * activation(norm(hidden) @ weight.T + bias)) + residual`.

    Args:
        hidden: `[rows, num_columns]`.
        weight: made for `WeightUse.LINEAR`.
        bias: `[num_rows]`.
        residual: `[rows, num_rows]`, which must not overlap `hidden`; its memory may be reused for
            the result.
        out_dtype: of the result; None for that of `hidden`.
        activation: applied to sums that are rounded to the type of `hidden`; None for none.
        scale: a factor.
        cap: numbers x become `cap * tanh(x / cap)` (arXiv:2408.00118); None leaves them unchanged.
        norm: of the inputs; None for none. Its result may be rounded in other places than that of
            `rms_norm`.
        out: `[rows, num_rows]`, contiguous, of the result's type; memory for the result, which the
            caller owns. Not with a residual.

    Returns:
        `[rows, num_rows]`.
    """
    result = F.linear(_normed(hidden, norm), _dense(weight), bias)
    if activation is not None:
        result = activate(result, activation)
    if out_dtype is not None and residual is None:
        result = result.to(out_dtype)
    if scale != 1.0:
        result = result * scale
    if cap is not None:
        result = cap * torch.tanh(result / cap)
    if residual is not None:
        result = residual + result
    if out is not None:
        return out.copy_(result)
    return result if out_dtype is None else result.to(out_dtype)


@kernel("weight.device", "weight.dtype")
def linear_gated(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    activation: Activation,
    *,
    norm: InputNorm | None = None,
) -> torch.Tensor:
    """Computes `activation(inputs @ gate.T) * (inputs @ up.T)`, where inputs are `norm(hidden)`.

    Args:
        hidden: `[rows, num_columns]`.
        weight: made for `WeightUse.GATED_LINEAR`: `gate` above `up`.
        bias: `[num_rows]`, the gate's above that of `up`; or None.
        activation: of the gate.
        norm: as in `linear`.

    Returns:
        `[rows, num_rows / 2]`.
    """
    gate, up = F.linear(_normed(hidden, norm), _dense(weight), bias).chunk(2, dim=-1)
    return gate_rows(up, gate, activation)


def _normed(hidden: torch.Tensor, norm: InputNorm | None) -> torch.Tensor:
    if norm is None:
        return hidden
    return rms_norm(hidden, norm.weight, norm.eps, kind=norm.kind)


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, DenseWeight)
    return weight.data


@kernel("weight.device", "weight.dtype")
def head_linear(states: torch.Tensor, weight: WeightStack) -> torch.Tensor:
    """Multiplies each head by a matrix of its own.

    Args:
        states: `[num_tokens, num_heads, width]`. Elements past the columns of a matrix are copied
            behind the products.
        weight: a matrix per head, made for `WeightUse.LINEAR`.

    Returns:
        `[num_tokens, num_heads, rows of a matrix + width - columns of a matrix]`.
    """
    num_copied = states.shape[2] - weight.num_columns
    factors, rest = torch.split(states, [weight.num_columns, num_copied], dim=2)
    products = torch.einsum("thc,hrc->thr", factors, weight.data)
    return torch.cat((products, rest), dim=2)
