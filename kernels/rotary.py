"""What is done to queries and keys before attention: arguments of `kernels.rotate_and_write_kv`."""

from dataclasses import dataclass

import torch

__all__ = ["QkNorms", "Rotation"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of each token's angles, `[num_tokens, head_dim / 2]` float32."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class QkNorms:
    """Root-mean-square norms of each head of queries and keys.

    Attributes:
        query_weight: `[head_dim]`.
        key_weight: `[head_dim]`.
        eps: added to the mean of squares.
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
