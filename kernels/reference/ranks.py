"""Operations of several ranks, in plain torch."""

import torch

from kernels.dispatch import kernel
from kernels.ranks import RankGroup

__all__ = ["gather_columns", "reduce_ranks"]


@kernel("partial.device", "dtype")
def reduce_ranks(
    partial: torch.Tensor,
    ranks: RankGroup,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> torch.Tensor:
    """Computes `scale * (sum over the ranks + bias) + residual`, and rounds once.

    Args:
        partial: `[rows, columns]` float32, contiguous; this rank's.
        ranks: the group.
        bias: `[columns]` of `dtype`, equal on all ranks.
        residual: `[rows, columns]` of `dtype`, equal on all ranks.
        dtype: of the result.
        scale: a factor.

    Returns:
        `[rows, columns]`, equal to the bit on all ranks.
    """
    total = ranks.all_reduce(partial)
    if bias is not None:
        total = total + bias.float()
    total = total * scale
    if residual is not None:
        total = total + residual.float()
    return total.to(dtype)


@kernel("part.device")
def gather_columns(part: torch.Tensor, ranks: RankGroup, num_columns: int) -> torch.Tensor:
    """Joins the ranks' columns on rank 0; see `RankGroup.gather_columns`."""
    return ranks.gather_columns(part, num_columns)
