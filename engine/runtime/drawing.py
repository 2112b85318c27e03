"""From a step's logits to its `StepOutput`: draws, most likely tokens, log-probabilities.

The logits' rows are those of the chunks that ask for something, then those of
the decode rows. Drawing does not wait for the device: what was drawn is read later.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import kernels
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

__all__ = ["ChunkDraws", "DecodeRows", "Draw", "draw_by_sampling"]

Draw = Callable[[Scores, np.ndarray, list[int], np.ndarray], torch.Tensor]
"""Draws tokens `[n]` int64 from scores: `[n]` of `DRAW_RECORD`, the row of the scores that each
draws from, and `[n]` int64 positions of the tokens."""


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
        logprobs[self.wanting] = kernels.token_logprobs(
            scores.logits, scores.maxima, tokens[self.wanting], self.wanting
        )
        return tuple(tokens.tolist()), tuple(logprobs.tolist())


class ChunkDraws:
    """What a step's chunks ask for.

    Args:
        chunks: the step's.

    Attributes:
        single: (index among all draws, chunk) of the chunks that draw one token, which
            their rows go on with.
    """

    def __init__(self, chunks: Sequence[ScheduledChunk]) -> None:
        self._chunks = chunks
        self._asking = [chunk for chunk in chunks if chunk.needs_logits]
        self._drawing = [(row, chunk) for row, chunk in enumerate(self._asking) if chunk.draws]
        self._wants_logprobs = any(chunk.wants_logprobs for _, chunk in self._drawing)
        self._num_tops = sorted({chunk.num_top for chunk in self._asking if chunk.num_top})
        self.single = list(self._find_single())

    def draw(self, scores: Scores, draw: Draw) -> list[torch.Tensor]:
        """Draws for all; what `outputs` wants of it, on the scores' device.

        Args:
            scores: the first are theirs, a row per chunk that needs logits.
            draw: how. The tokens come first, where any chunk draws.
        """
        return [*self._draw(scores, draw), *self._most_likely(scores.logits)]

    def outputs(self, drawn: Sequence[torch.Tensor]) -> list[ChunkOutput | None]:
        """One per chunk; None where it asked for nothing.

        Args:
            drawn: what `draw` gave, on the host.
        """
        parts = iter(drawn)
        answer_of_row = self._deal(parts) | self._deal_most_likely(parts)
        answers = (answer_of_row[row] for row in range(len(self._asking)))
        return [next(answers) if chunk.needs_logits else None for chunk in self._chunks]

    def _find_single(self) -> Iterator[tuple[int, ScheduledChunk]]:
        index = 0
        for _, chunk in self._drawing:
            if len(chunk.draws) == 1:
                yield index, chunk
            index += len(chunk.draws)

    def _draw(self, scores: Scores, draw: Draw) -> Iterator[torch.Tensor]:
        """Tokens, then log-probabilities if any chunk wants them."""
        if not self._drawing:
            return
        draws = [(row, chunk, params) for row, chunk in self._drawing for params in chunk.draws]
        rows = [row for row, _, _ in draws]
        records = np.array([draw_record(params) for _, _, params in draws], DRAW_RECORD)
        ends = [chunk.start_position + chunk.num_tokens for _, chunk, _ in draws]
        tokens = draw(scores, records, rows, np.array(ends, np.int64))
        yield tokens
        if self._wants_logprobs:
            logit_rows = to_device(np.array(rows, np.int64), tokens.device)
            yield kernels.token_logprobs(scores.logits, scores.maxima, tokens, logit_rows)

    def _most_likely(self, logits: torch.Tensor) -> Iterator[torch.Tensor]:
        """For each number of most likely tokens: the tokens, and their log-probabilities."""
        for num_top in self._num_tops:
            rows = to_device(np.array(self._rows_of_top(num_top), np.int64), logits.device)
            log_probs = logits[rows].log_softmax(dim=-1)
            values, tokens = log_probs.topk(min(num_top, logits.shape[-1]), dim=-1)
            yield tokens.where(values[:, :1].isfinite(), INVALID_TOKEN)
            yield values

    def _rows_of_top(self, num_top: int) -> list[int]:
        return [row for row, chunk in enumerate(self._asking) if chunk.num_top == num_top]

    def _deal(self, parts: Iterator[torch.Tensor]) -> dict[int, ChunkOutput]:
        """By row: what its chunk drew."""
        answers: dict[int, ChunkOutput] = {}
        if not self._drawing:
            return answers
        tokens, start = next(parts).tolist(), 0
        logprobs = next(parts).tolist() if self._wants_logprobs else []
        for row, chunk in self._drawing:
            part = slice(start, start + len(chunk.draws))
            wanted = logprobs[part] if chunk.wants_logprobs else ()
            answers[row] = ChunkOutput(tuple(tokens[part]), tuple(wanted))
            start = part.stop
        return answers

    def _deal_most_likely(self, parts: Iterator[torch.Tensor]) -> dict[int, ChunkOutput]:
        """By row: the most likely tokens of chunks that ask for them."""
        answers: dict[int, ChunkOutput] = {}
        for num_top in self._num_tops:
            reports = zip(next(parts).tolist(), next(parts).tolist(), strict=True)
            for row, (tokens, logprobs) in zip(self._rows_of_top(num_top), reports, strict=True):
                answers[row] = ChunkOutput(tuple(tokens), tuple(logprobs))
        return answers


def draw_by_sampling(
    scores: Scores, records: np.ndarray, rows: list[int], positions: np.ndarray
) -> torch.Tensor:
    """A `Draw` by `sample`."""
    return sample(scores, prepare_draws(records, scores.logits.device, rows), positions)
