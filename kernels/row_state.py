"""The state of running sequences on a device: positions, tokens, block tables, sampling parameters.

The tensors keep their addresses, so that a recorded step reads what the step before it wrote.
"""

from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["INVALID_TOKEN", "DecodeInputs", "DrawTable", "RowState"]

INVALID_TOKEN: Final = -1
"""The token id of rows whose logits hold NaN or infinity, or no finite number."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawTable:
    """Sampling parameters, a row for each way of drawing a token.

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
        """Returns the rows `draw_ids`, `[n]` int64, as a copy."""
        return DrawTable(
            temperature=self.temperature.index_select(0, draw_ids),
            top_k=self.top_k.index_select(0, draw_ids),
            top_p=self.top_p.index_select(0, draw_ids),
            seed=self.seed.index_select(0, draw_ids),
        )

    def part(self, entries: slice) -> "DrawTable":
        """Returns a slice of the rows as views of the same memory."""
        return DrawTable(
            temperature=self.temperature[entries],
            top_k=self.top_k[entries],
            top_p=self.top_p[entries],
            seed=self.seed[entries],
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowState:
    """A row per running sequence; the last row is a spare one that padding refers to.

    Attributes:
        tables: `[num_layer_groups, num_rows, max_blocks]` int32 block ids, contiguous.
        positions: `[num_rows]` int64; position of the token that runs next. The spare row's
            stays 0.
        last_tokens: `[num_rows]` int64; the token drawn last, which runs next.
        draws: sampling parameters, `num_rows` of them.
    """

    tables: torch.Tensor
    positions: torch.Tensor
    last_tokens: torch.Tensor
    draws: DrawTable


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """Inputs of a step of `n` sequences that run one token each.

    Attributes:
        token_ids: `[n]` int64; the tokens to run.
        positions: `[n]` int64; positions of these tokens.
        draw_positions: `[n]` int64; positions of the tokens to draw.
        query_starts: `[n + 1]` int32; 0 to n, the same in every step.
        context_lens: `[n]` int32; tokens of each sequence, including the one that runs.
        tables: `[num_layer_groups, n, max_blocks]` int32; entries past a context's last block may
            hold anything.
        slots: `[num_layer_groups, n]` int64; the KV slots that the tokens write to.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    draw_positions: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor
