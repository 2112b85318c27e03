"""`DrawTable`: how tokens are drawn from logits, on the logits' device."""

from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["INVALID_TOKEN", "DrawTable"]

INVALID_TOKEN: Final = -1
"""Stands for a token where logits hold NaN or infinity, or no finite number."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawTable:
    """Ways of drawing a token.

    Attributes:
        temperature: `[m]` float64; 0 takes the likeliest token.
        top_k: `[m]` int64; how many of the likeliest tokens are drawn from. 0: all.
        top_p: `[m]` float64; what share of the probability is drawn from. 1: all.
        seed: `[m]` int64; the bits of the unsigned 64-bit seed of the noise.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor

    def take(self, draw_ids: torch.Tensor) -> "DrawTable":
        """Those of `draw_ids`, `[n]` int64."""
        return DrawTable(
            temperature=self.temperature.index_select(0, draw_ids),
            top_k=self.top_k.index_select(0, draw_ids),
            top_p=self.top_p.index_select(0, draw_ids),
            seed=self.seed.index_select(0, draw_ids),
        )

    def part(self, entries: slice) -> "DrawTable":
        """Those of a slice, in the same memory."""
        return DrawTable(
            temperature=self.temperature[entries],
            top_k=self.top_k[entries],
            top_p=self.top_p[entries],
            seed=self.seed[entries],
        )
