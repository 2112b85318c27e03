"""Scores of a step, draw parameters as arrays, and draws of a step's chunks.

`kernels.reference.sampling` defines how a token is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch

import kernels
from engine.draw_params import DrawParams
from engine.runtime.device import to_device
from kernels import DRAW_RECORD, DrawTable, draw_kinds

__all__ = [
    "Scores",
    "draw_inputs",
    "draw_record",
    "draw_sent",
    "draw_table",
    "draw_tokens",
    "draw_words",
]

_stated_columns = attrgetter(*(DRAW_RECORD.names or ())[:-1])  # all but the seed


@dataclass(frozen=True, slots=True)
class Scores:
    """Rows of logits and their maxima.

    Attributes:
        logits: `[rows, vocab]` float32.
        maxima: `[rows]` float32; the maximum of each row.
        likeliest: `[rows]` int64; the lowest token id with the maximum. `INVALID_TOKEN`
            if a row holds NaN or infinity, or no finite number; `NO_TOKEN` if that is so
            after rules have changed the row.
        hidden: `[num_tokens, hidden_size]`; the final hidden states of all tokens of the
            step, if it needs them.
        states: `[layers, rows, hidden_size]`; the states that the step has kept, if any.
    """

    logits: torch.Tensor
    maxima: torch.Tensor
    likeliest: torch.Tensor
    hidden: torch.Tensor | None = None
    states: torch.Tensor | None = None

    def copy(self) -> "Scores":
        """Returns a copy that rules do not change, without `hidden` and `states`."""
        return Scores(self.logits.clone(), self.maxima.clone(), self.likeliest.clone())

    def last(self, num_rows: int) -> "Scores":
        """Returns the scores of the last `num_rows` rows."""
        start = len(self.likeliest) - num_rows
        if not start:
            return self
        return Scores(self.logits[start:], self.maxima[start:], self.likeliest[start:])


def draw_record(draw: DrawParams) -> tuple[Any, ...]:
    """Returns the parameters, without rules, as an element of a `DRAW_RECORD` array."""
    return *_stated_columns(draw.params), draw.seed


def draw_words(records: np.ndarray) -> np.ndarray:
    """Returns `[n]` of `DRAW_RECORD` as words for `DrawTable.of_words`."""
    num_fields = DRAW_RECORD.itemsize // 8
    return np.ascontiguousarray(records.view(np.int64).reshape(-1, num_fields).T)


def draw_table(records: np.ndarray, device: torch.device) -> DrawTable:
    """Copies `[n]` of `DRAW_RECORD` to the device."""
    return DrawTable.of_words(to_device(draw_words(records), device))


def draw_inputs(records: np.ndarray, rows: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Returns what `draw_sent` needs on the device of the scores.

    Args:
        records: `[n]` of `DRAW_RECORD`.
        rows: per draw, the row of the scores that it draws from.
        positions: per draw, the position of the token.

    Returns:
        `[3 + columns of a DrawTable, n]` int64: numbers of the draws, positions, rows, parameters.
    """
    order = np.array((range(len(records)), positions, rows), np.int64)
    return np.concatenate((order, draw_words(records)))


def draw_sent(scores: Scores, records: np.ndarray, inputs: torch.Tensor) -> torch.Tensor:
    """Draws tokens; does not wait for the device.

    Args:
        scores: scores of the rows.
        records: `[n]` of `DRAW_RECORD`.
        inputs: what `draw_inputs` returned, on the device.

    Returns:
        `[n]` int64 token ids; the row's likeliest token if that is negative, which stands
        for none. Such a row does not affect the others.
    """
    is_random, is_filtered = draw_kinds(records)
    draw_ids, positions, logit_rows = inputs[:3]
    if not is_random.any():
        return scores.likeliest.index_select(0, logit_rows)
    return kernels.draw_tokens(
        scores.logits,
        scores.maxima,
        scores.likeliest,
        DrawTable.of_words(inputs[3:]),
        draw_ids=draw_ids,
        positions=positions,
        logit_rows=logit_rows,
        filtered=bool(is_filtered.any()),
    )


def draw_tokens(
    scores: Scores, records: np.ndarray, rows: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Sends the inputs of draws to the device, and draws as `draw_sent` does."""
    inputs = to_device(draw_inputs(records, rows, positions), scores.logits.device)
    return draw_sent(scores, records, inputs)
