"""`RowState` and `DecodeInputs`: what running sequences are at, and what a decode step reads.

Both stay where they are, so that a recorded step finds there what the step before it left.
"""

from dataclasses import dataclass

import torch

from kernels.draws import DrawTable

__all__ = ["DecodeInputs", "RowState"]


@dataclass(frozen=True, slots=True, eq=False)
class RowState:
    """A row per running sequence, and a spare one, the last, that padding names.

    Attributes:
        tables: `[num_groups, num_rows, max_blocks]` int32 block ids, contiguous.
        positions: `[num_rows]` int64; of the next token to run. The spare row's stays 0.
        last_tokens: `[num_rows]` int64; the token drawn last, which runs next.
        draws: `num_rows` of them; how each row's tokens are drawn.
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
        positions: `[n]` int64; theirs.
        draw_positions: `[n]` int64; of the tokens to draw.
        query_starts: `[n + 1]` int32; 0 to n, which no step changes.
        context_lens: `[n]` int32; tokens of each sequence, the one that runs among them.
        tables: `[num_groups, n, max_blocks]` int32; anything behind a context's last block.
        slots: `[num_groups, n]` int64; where the tokens' KV goes.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    draw_positions: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor
