"""Norms over the last axis."""

from collections.abc import Iterator

import torch
from torch import nn
from typing_extensions import override

import kernels
from engine.models.tensor_parts import StoredModule, TensorPart
from kernels import Cut, InputNorm, NormKind, RankGroup

__all__ = ["LayerNorm", "RmsNorm", "split_norm"]


class RmsNorm(StoredModule):
    """Root-mean-square norm with a learned scale over the last axis.

    Args:
        size: width of the axis, or this rank's range of it.
        eps: added to the mean of squares.
        kind: where the result is rounded, and whether 1 is added to the scale.
        ranks: the ranks that share the axis; None if this rank has all of it.
    """

    def __init__(
        self,
        size: int | Cut,
        eps: float,
        kind: NormKind = NormKind.ROUNDED,
        ranks: RankGroup | None = None,
    ) -> None:
        super().__init__()
        self._cut = Cut.whole(size) if isinstance(size, int) else size
        self.weight = nn.Parameter(torch.empty(self._cut.size))
        self.eps, self.kind = eps, kind
        self._ranks = ranks

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalizes `[..., size]`, and adds `residual`; returns the same shape.

        The content of `residual` is undefined afterwards, as the result may use its memory.
        """
        if self._ranks is not None:
            assert residual is None
            return self._forward_part(hidden, self._ranks)
        return kernels.rms_norm(hidden, self.weight, self.eps, kind=self.kind, residual=residual)

    @property
    def of_inputs(self) -> InputNorm | None:
        """The norm as part of a product of its results; None if ranks share the axis."""
        return None if self._ranks is not None else InputNorm(self.weight, self.eps, self.kind)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        yield TensorPart(f"{path}.weight", self.weight, (self._cut,))

    def _forward_part(self, hidden: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        """Normalizes this rank's part of rows, `[rows, size]`, by the mean over all ranks."""
        assert self.kind is not NormKind.OFFSET, "no family divides rows with such a norm"
        wide = hidden.float()
        squares = kernels.reduce_ranks(
            wide.pow(2).sum(-1, keepdim=True), ranks, dtype=torch.float32
        )
        # Ranks that have the same heads count them once each.
        scale = torch.rsqrt(squares / (ranks.size * self._cut.size) + self.eps)
        if self.kind is NormKind.ROUNDED:
            return self.weight * (wide * scale).to(hidden.dtype)
        return (wide * scale * self.weight.float()).to(hidden.dtype)


class LayerNorm(nn.Module):
    """Norm of the distances from the mean (arXiv:1607.06450).

    Args:
        size: width of the axis.
        eps: added to the variance.
        has_weight: whether it has a learned scale.
        has_bias: whether it has a bias.
    """

    def __init__(
        self, size: int, eps: float, *, has_weight: bool = True, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size)) if has_weight else None
        self.bias = nn.Parameter(torch.empty(size)) if has_bias else None
        self.eps = eps

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalizes `[..., size]`, and adds `residual`; returns the same shape."""
        return kernels.layer_norm(hidden, self.weight, self.bias, self.eps, residual=residual)


def split_norm(
    hidden: torch.Tensor, norm: nn.Module | None
) -> tuple[torch.Tensor, InputNorm | None]:
    """Returns a product's inputs, and the norm that is left to the product.

    Args:
        hidden: inputs of the norm.
        norm: changes rows; None for none.
    """
    if norm is None:
        return hidden, None
    of_inputs = norm.of_inputs if isinstance(norm, RmsNorm) else None
    return (norm(hidden) if of_inputs is None else hidden), of_inputs
