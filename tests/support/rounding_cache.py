"""`RoundingCache`: a KV cache of `transformers` that rounds as an 8-bit pool does."""

import torch
from transformers import DynamicCache, PretrainedConfig

from kernels.reference.cache import quantize_kv

__all__ = ["RoundingCache", "rounded"]


class RoundingCache(DynamicCache):
    """A cache that rounds each token's K and V of a head as 8-bit elements with a factor do.

    A latent vector has one factor, although `transformers` caches its two parts as K and V.

    Args:
        config: of the model.
        dtype: of the elements.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        super().__init__(config=config)
        self._is_latent = getattr(config, "kv_lora_rank", None) is not None
        self._dtype = dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = key_states, value_states
        if self._is_latent:
            widths = [part.shape[-1] for part in states]
            states = rounded(torch.cat(states, dim=-1), self._dtype).split(widths, dim=-1)
        else:
            states = tuple(rounded(part, self._dtype) for part in states)
        return super().update(*states, *args, **kwargs)


def rounded(states: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Returns K or V after a way through 8-bit elements and back."""
    narrow, scales = quantize_kv(states, dtype)
    return narrow.float() * scales.unsqueeze(-1)
