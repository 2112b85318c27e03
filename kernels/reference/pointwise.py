"""Norms, activations, rotary positions and maxima, in plain torch."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from kernels.dispatch import kernel
from kernels.layer_kinds import CLAMP_LIMIT, CLAMP_SLOPE, Activation, NormKind
from kernels.paged_kv import Rotation

__all__ = [
    "activate",
    "apply_rotary",
    "gate_rows",
    "layer_norm",
    "rms_norm",
    "rotary_angles",
    "row_maxima",
]


@kernel("hidden.device", "hidden.dtype")
def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    kind: NormKind = NormKind.ROUNDED,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `hidden / sqrt(mean(hidden^2) + eps) * weight` by row (arXiv:1910.07467).

    Args:
        hidden: `[..., size]`.
        weight: `[size]`.
        eps: added to the mean of squares.
        kind: where the result is rounded, and whether 1 is added to the weight.
        residual: added to the rounded result; shaped as `hidden`, and not overlapping it. Its
            memory may be reused for the result.
    """
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if kind is NormKind.ROUNDED:
        normed = weight * wide.to(hidden.dtype)
    else:
        factors = weight.float() + 1.0 if kind is NormKind.OFFSET else weight.float()
        normed = (wide * factors).to(hidden.dtype)
    return normed if residual is None else residual + normed


@kernel("values.device", "values.dtype")
def gate_rows(
    values: torch.Tensor, gates: torch.Tensor, activation: Activation | None
) -> torch.Tensor:
    """Computes `values * activation(gates)`; see `Activation` for one that changes values first.

    Args:
        values: `[rows, size]`, any strides.
        gates: as `values`.
        activation: of the gates; None for none.

    Returns:
        `[rows, size]`, contiguous.
    """
    if activation is Activation.CLAMPED_SILU:
        values = values.clamp(-CLAMP_LIMIT, CLAMP_LIMIT) + 1.0
    return (activate(gates, activation) * values).contiguous()


def activate(values: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    """Applies an activation to each number; None changes nothing."""
    if activation is None:
        return values
    if activation is Activation.SILU:
        return F.silu(values)
    if activation is Activation.RELU:
        return F.relu(values)
    if activation is Activation.SIGMOID:
        return values.sigmoid()
    if activation is Activation.CLAMPED_SILU:
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        clamped = wide.clamp(max=CLAMP_LIMIT)
        return (clamped * (CLAMP_SLOPE * clamped).sigmoid()).to(values.dtype)
    return F.gelu(values, approximate="tanh" if activation is Activation.GELU_TANH else "none")


@kernel("hidden.device", "hidden.dtype")
def layer_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `(hidden - mean) / sqrt(variance + eps) * weight + bias` by row (arXiv:1607.06450).

    Args:
        hidden: `[..., size]`.
        weight: `[size]`; None for ones.
        bias: `[size]`; None for zeros.
        eps: added to the variance.
        residual: added to the rounded result; as that of `rms_norm`.
    """
    normed = F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)
    return normed if residual is None else residual + normed


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first elements of each head by the token's angles.

    The pairs are the halves of these elements (arXiv:2104.09864).

    Args:
        states: `[num_tokens, num_heads, head_dim]`.
        cos: `[num_tokens, rotary_dim / 2]`, of the dtype of `states`; `rotary_dim` is at most
            `head_dim`.
        sin: as `cos`.
    """
    half = cos.shape[1]
    sizes = [half, half, states.shape[2] - 2 * half]
    first, second, unrotated = torch.split(states, sizes, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*rotated, unrotated), dim=-1)


@kernel("frequencies.device", "frequencies.dtype")
def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float) -> Rotation:
    """Computes cosines and sines of positions' angles, times `amplitude` (arXiv:2104.09864).

    Args:
        positions: `[num_tokens]` int64.
        frequencies: `[rotary_dim / 2]` float32, radians per position.
        amplitude: 1, or the factor of a scaling for long contexts.
    """
    angles = positions.unsqueeze(1).float() * frequencies
    return Rotation(angles.cos() * amplitude, angles.sin() * amplitude)


@kernel("logits.device", "logits.dtype")
def row_maxima(
    logits: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds each row's largest value, NaN if the row holds one, and its first index.

    Args:
        logits: `[rows, vocab]` float32.
        out: tensors that receive both results and are returned. In a recorded step they keep their
            addresses.

    Returns:
        `[rows]` float32 and `[rows]` int64, which is -1 if the value is not finite.
    """
    maxima, indices = torch.max(logits, dim=-1, out=out)
    indices.masked_fill_(~maxima.isfinite(), -1)
    return maxima, indices
