"""From a step's logits to its `StepOutput`: draws, most likely tokens, log-probabilities.

The logits' rows are those of the chunks that ask for something, then those of
the decode rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import INVALID_TOKEN, ChunkOutput, ScheduledChunk
from engine.runtime.device import to_device
from engine.runtime.rows import Rows
from engine.runtime.sampler import (
    DRAW_RECORD,
    PreparedDraws,
    Scores,
    draw_record,
    prepare_draws,
    sample,
)

__all__ = ["DecodeRows", "draw_chunks"]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows that decode, and how: what stays the same as long as the same rows do.

    Attributes:
        rows: the batch's `decode_rows`.
        ids: `[n]` int64; the same as an array.
        draws: how they draw, on the device.
        wanting: `[m]` int64; indices of those that want log-probabilities.
    """

    rows: tuple[int, ...]
    ids: np.ndarray
    draws: PreparedDraws
    wanting: torch.Tensor

    @classmethod
    def of(cls, decode_rows: tuple[int, ...], rows: Rows, device: torch.device) -> "DecodeRows":
        """Reads what the rows' chunks left in `rows`."""
        ids = np.array(decode_rows, np.int64)
        return cls(
            rows=decode_rows,
            ids=ids,
            draws=prepare_draws(rows.draws[ids], device),
            wanting=to_device(np.flatnonzero(rows.wants_logprobs[ids]), device),
        )

    def draw(
        self, scores: Scores, positions: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens, and their log-probabilities if any row wants them: NaN for those that do not.

        Args:
            scores: theirs are the last `n`.
            positions: `[num_rows]` int64; of the token to draw, by row.
        """
        if not self.rows:
            return (), ()
        scores = scores.last(len(self.rows))
        tokens = sample(scores, self.draws, positions[self.ids])
        if not len(self.wanting):
            return tuple(tokens.tolist()), ()
        logprobs = torch.full(tokens.shape, math.nan, device=tokens.device)
        of_wanting = list(range(len(self.wanting)))
        logprobs[self.wanting] = _logprobs(
            scores.logits[self.wanting], of_wanting, tokens[self.wanting]
        )
        return tuple(tokens.tolist()), tuple(logprobs.tolist())


def draw_chunks(scores: Scores, chunks: Sequence[ScheduledChunk]) -> list[ChunkOutput | None]:
    """Does what chunks ask for.

    Args:
        scores: the first are theirs, a row per chunk that needs logits.
        chunks: the step's.
    """
    asking = [chunk for chunk in chunks if chunk.needs_logits]
    if not asking:
        return [None] * len(chunks)
    answer_of_row = _draw(scores, asking) | _most_likely(scores.logits, asking)
    answers = (answer_of_row[row] for row in range(len(asking)))
    return [next(answers) if chunk.needs_logits else None for chunk in chunks]


def _draw(scores: Scores, asking: Sequence[ScheduledChunk]) -> dict[int, ChunkOutput]:
    """By row: what chunks drew, those that draw."""
    drawing = [(row, chunk) for row, chunk in enumerate(asking) if chunk.draws]
    if not drawing:
        return {}
    rows = [row for row, chunk in drawing for _ in chunk.draws]
    records = [draw_record(draw) for _, chunk in drawing for draw in chunk.draws]
    ends = [chunk.start_position + chunk.num_tokens for _, chunk in drawing for _ in chunk.draws]
    prepared = prepare_draws(np.array(records, DRAW_RECORD), scores.logits.device, rows)
    tokens = sample(scores, prepared, np.array(ends, np.int64))
    logprobs: list[float] = []
    if any(chunk.wants_logprobs for _, chunk in drawing):
        logprobs = _logprobs(scores.logits, rows, tokens).tolist()
    return _deal(drawing, tokens.tolist(), logprobs)


def _deal(
    drawing: Sequence[tuple[int, ScheduledChunk]], tokens: list[int], logprobs: list[float]
) -> dict[int, ChunkOutput]:
    """Gives each row's chunk its part of what was drawn for all."""
    answers, start = {}, 0
    for row, chunk in drawing:
        part = slice(start, start + len(chunk.draws))
        wanted = logprobs[part] if chunk.wants_logprobs else ()
        answers[row] = ChunkOutput(tuple(tokens[part]), tuple(wanted))
        start = part.stop
    return answers


def _most_likely(logits: torch.Tensor, asking: Sequence[ScheduledChunk]) -> dict[int, ChunkOutput]:
    """By row: the `num_top` most likely tokens of chunks that ask for them."""
    answers: dict[int, ChunkOutput] = {}
    for num_top in {chunk.num_top for chunk in asking if chunk.num_top}:
        rows = [row for row, chunk in enumerate(asking) if chunk.num_top == num_top]
        log_probs = logits[rows].log_softmax(dim=-1)
        values, tokens = log_probs.topk(min(num_top, logits.shape[-1]), dim=-1)
        tokens = tokens.where(values[:, :1].isfinite(), INVALID_TOKEN)
        reports = zip(tokens.tolist(), values.tolist(), strict=True)
        for row, (token_ids, logprobs) in zip(rows, reports, strict=True):
            answers[row] = ChunkOutput(tuple(token_ids), tuple(logprobs))
    return answers


def _logprobs(logits: torch.Tensor, rows: list[int], tokens: torch.Tensor) -> torch.Tensor:
    """`[n]` log-softmax at `tokens` of the rows they were drawn from; NaN for invalid ones."""
    return logits.log_softmax(dim=-1)[rows, tokens.clamp(min=0)]
