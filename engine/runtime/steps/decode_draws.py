"""`DecodeDraws`: draws the tokens of the rows that decode, on the device."""

import numpy as np
import torch

import kernels
from engine.runtime.draws.device_rows import DeviceRows
from engine.runtime.draws.rules import RuledRows
from engine.runtime.draws.sampler import Scores
from kernels import draw_kinds

__all__ = ["DecodeDraws"]


class DecodeDraws:
    """Draws tokens, and advances the rows' state by them. Launches only what the rows need.

    Args:
        rows: the rows.
        max_rows: maximum number of rows that decode.
        device: the device of the rows' state.

    Attributes:
        tokens: `[max_rows]` int64; the tokens that the last step drew.
        ruled: the rows that decode and have rules; None if none has.
    """

    ruled: RuledRows | None = None

    def __init__(self, rows: DeviceRows, max_rows: int, device: torch.device) -> None:
        self._rows = rows
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._is_random = self._is_filtered = False

    def set_rows(self, row_ids: np.ndarray) -> None:
        """Sets the rows that decode."""
        host = self._rows.host
        kinds = draw_kinds(host.draws[row_ids])
        self._is_random, self._is_filtered = (bool(kind.any()) for kind in kinds)
        self.ruled = RuledRows.among(row_ids, host.has_rules, self.tokens.device)

    def draw(self, scores: Scores, positions: torch.Tensor, row_ids: torch.Tensor) -> None:
        """Draws the next tokens of `n` rows into `tokens`, and advances their state.

        Args:
            scores: scores of the rows.
            positions: `[n]` int64; positions of the tokens to draw.
            row_ids: `[n]` int64; the rows that decode.
        """
        tokens = self.tokens[: len(row_ids)]
        if self._is_random:
            kernels.draw_tokens(
                scores.logits,
                scores.maxima,
                scores.likeliest,
                self._rows.state.draws,
                draw_ids=row_ids,
                positions=positions,
                filtered=self._is_filtered,
                out=tokens,
            )
        else:
            tokens.copy_(scores.likeliest)
        self.advance(row_ids)

    def advance(self, row_ids: torch.Tensor) -> None:
        """Advances rows by `tokens`. If another rank draws these, the caller stores its tokens
        before the rows decode again, if it reads tokens.
        """
        kernels.keep_drawn(self._rows.state, row_ids, self.tokens[: len(row_ids)])
