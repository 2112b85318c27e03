"""`RoundingCache`: a KV cache of `transformers` that rounds as an 8-bit pool does."""

import torch
from transformers import DynamicCache

from kernels.reference.cache import quantize_kv

__all__ = ["RoundingCache", "rounded"]


class RoundingCache(DynamicCache):
    """A cache that rounds each token's K and V of a head as 8-bit floats with a factor do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


def rounded(states: torch.Tensor) -> torch.Tensor:
    """Returns K or V after a way through 8-bit floats and back."""
    narrow, scales = quantize_kv(states)
    return narrow.float() * scales.unsqueeze(-1)
