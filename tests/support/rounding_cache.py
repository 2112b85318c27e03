"""`RoundingCache`: a KV cache of `transformers` that rounds as an 8-bit pool does."""

import torch
from transformers import DynamicCache

from kernels.reference.cache import quantize_kv

__all__ = ["RoundingCache", "rounded"]


class RoundingCache(DynamicCache):
    """A cache that rounds each token's K and V of a head as 8-bit elements with a factor do.

    Args:
        dtype: of the elements.
    """

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        super().__init__()
        self._dtype = dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounded_states = [rounded(states, self._dtype) for states in (key_states, value_states)]
        return super().update(*rounded_states, *args, **kwargs)


def rounded(states: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Returns K or V after a way through 8-bit elements and back."""
    narrow, scales = quantize_kv(states, dtype)
    return narrow.float() * scales.unsqueeze(-1)
