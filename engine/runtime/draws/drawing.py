"""Computes a step's outputs from its logits: tokens, most likely tokens, log-probabilities.

The rows of the logits are those of the chunks that need logits, then those of the
decode rows. `ChunkDraws.draw` does not wait for the device; its results are read later.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

import numpy as np
import torch

import kernels
from engine.batch import INVALID_TOKEN, ChunkOutput, ScheduledChunk
from engine.runtime.device import to_device
from engine.runtime.draws.logprobs import (
    DecodedTokens,
    DecodeReports,
    ReportedTokens,
    reports_model_logprobs,
)
from engine.runtime.draws.rows import Rows, num_leading_equal
from engine.runtime.draws.rules import RuledRows
from engine.runtime.draws.sampler import (
    Scores,
    draw_inputs,
    draw_record,
    draw_sent,
    draw_table,
)
from kernels import DRAW_RECORD, DrawTable, draw_kinds

__all__ = ["ChunkDraws", "DecodeRows"]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows that decode and their draw parameters; reused while the same rows decode.

    Attributes:
        rows: the batch's `decode_rows`.
        ids: `[n]` int64; `rows` as an array.
        draws: the rows' draw parameters, on the device.
        draw_ids: `[n]` int64; 0 to n.
        is_random: whether any row's draw is not greedy.
        is_filtered: whether any of those filters by top-k, top-p or min-p.
        ruled: the rows that have rules; None if none has.
        reports: the log-probabilities that the rows report.
    """

    rows: tuple[int, ...]
    ids: np.ndarray
    draws: DrawTable
    draw_ids: torch.Tensor
    is_random: bool
    is_filtered: bool
    ruled: RuledRows | None
    reports: DecodeReports

    @classmethod
    def of(
        cls,
        decode_rows: tuple[int, ...],
        rows: Rows,
        device: torch.device,
        *,
        is_processed: bool,
    ) -> "DecodeRows":
        """Reads the rows' draw parameters, which their chunks set, from `rows`.

        Args:
            decode_rows: the batch's.
            rows: the state of all rows.
            device: the scores' device.
            is_processed: as in `ReportedTokens.among`.
        """
        ids = np.array(decode_rows, np.int64)
        records = rows.draws[ids]
        is_random, is_filtered = draw_kinds(records)
        return cls(
            rows=decode_rows,
            ids=ids,
            draws=draw_table(records, device),
            draw_ids=to_device(np.arange(len(ids)), device),
            is_random=bool(is_random.any()),
            is_filtered=bool(is_filtered.any()),
            ruled=RuledRows.among(ids, rows.has_rules, device),
            reports=DecodeReports.of(rows, ids, device, is_processed=is_processed),
        )

    def draw(self, scores: Scores, raw: Scores, positions: np.ndarray) -> "DecodedTokens":
        """Draws the rows' tokens, and computes log-probabilities if requested for any row.

        Args:
            scores: the step's scores; the decode rows' are the last `n`.
            raw: the model's own scores.
            positions: `[num_rows]` int64; per row, the position of the token to draw.
        """
        if not self.rows:
            return DecodedTokens()
        scores, raw = scores.last(len(self.rows)), raw.last(len(self.rows))
        tokens = self._draw(scores, positions[self.ids]) if self.is_random else scores.likeliest
        return self.reports.read(self.reports.compute(scores, raw, tokens))

    def _draw(self, scores: Scores, positions: np.ndarray) -> torch.Tensor:
        return kernels.draw_tokens(
            scores.logits,
            scores.maxima,
            scores.likeliest,
            self.draws,
            draw_ids=self.draw_ids,
            positions=to_device(positions, scores.logits.device),
            filtered=self.is_filtered,
        )


class ChunkDraws:
    """Draws and reports the tokens of a step's chunks.

    Args:
        chunks: the step's chunks.
        is_processed: as in `ReportedTokens.among`.

    Attributes:
        ruled: (row of the scores, chunk) of the chunks that draw and have rules or a mask. The
            first list has those that draw after known tokens, the next one those that draw after
            one draft, and so on: a row is once in each.
        with_processors: (row of the scores, chunk) of the chunks that draw and whose logits logits
            processors change.
        keeps_raw: whether rules, masks or processors change logits that are reported as the model
            computed them.
    """

    def __init__(self, chunks: Sequence[ScheduledChunk], *, is_processed: bool) -> None:
        self._chunks = chunks
        # By row of the scores: its chunk, and how many of the chunk's drafts it comes after.
        self._places = [
            (chunk, place)
            for chunk in chunks
            if chunk.needs_logits
            for place in range(1 + chunk.num_drafts)
        ]
        self._drawing = [
            (row, chunk, place) for row, (chunk, place) in enumerate(self._places) if chunk.draws
        ]
        draws = [
            (row, chunk.end + place, p) for row, chunk, place in self._drawing for p in chunk.draws
        ]
        # Per draw: its row of the scores, the position of its token, its parameters.
        self._rows = [row for row, _, _ in draws]
        self._ends = [end for _, end, _ in draws]
        self._params = [params for _, _, params in draws]
        self._wants_logprobs = any(chunk.wants_logprobs for _, chunk, _ in self._drawing)
        self._is_processed = is_processed
        self._reported: ReportedTokens | None = None
        self._num_tops = sorted({chunk.num_top for chunk, _ in self._places if chunk.num_top})
        self.ruled = self._find_ruled()
        self.with_processors = [
            (row, chunk) for row, chunk, _ in self._drawing if chunk.processed is not None
        ]
        self.keeps_raw = self._keeps_raw()

    @cached_property
    def _records(self) -> np.ndarray:
        """The parameters of the draws, `[draws]` of `DRAW_RECORD`."""
        return np.array([draw_record(params) for params in self._params], DRAW_RECORD)

    def inputs(self) -> np.ndarray:
        """Returns what `draw` needs on the device of the scores, `[columns, draws]` int64."""
        return draw_inputs(self._records, self._rows, self._ends)

    def draw(
        self, scores: Scores, raw: Scores, inputs: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Computes the outputs of all chunks; `outputs` reads them once they are on the host.

        Args:
            scores: the step's scores; the first rows are those of the chunks that need logits.
            raw: the model's own scores.
            inputs: what `inputs` returned, on the device; None to send it.

        Returns:
            Tensors on the scores' device. If any chunk draws, the first holds the tokens.
        """
        drawn = self._draw(scores, raw, inputs) if self._drawing else ()
        return [*drawn, *self._most_likely(raw.logits)]

    def outputs(self, drawn: Sequence[torch.Tensor]) -> list[ChunkOutput | None]:
        """Returns one output per chunk; None for a chunk that needs no logits.

        Args:
            drawn: the tensors that `draw` returned, on the host.
        """
        tensors = iter(drawn)
        output_of_row = self._drawn_outputs(tensors) | self._most_likely_outputs(tensors)
        outputs = (output_of_row[row] for row in range(len(self._places)))
        return [
            _accepted(chunk, list(islice(outputs, 1 + chunk.num_drafts)))
            if chunk.needs_logits
            else None
            for chunk in self._chunks
        ]

    def _keeps_raw(self) -> bool:
        changed = [chunk for _, chunk in chain(*self.ruled, self.with_processors)]
        if not changed:
            return False
        wants_logprobs = np.array([chunk.wants_logprobs for chunk in changed])
        nums = np.array([chunk.num_logprobs for chunk in changed])
        reported = reports_model_logprobs(wants_logprobs, nums, is_processed=self._is_processed)
        return bool(reported.any())

    def _find_ruled(self) -> list[list[tuple[int, ScheduledChunk]]]:
        ruled: list[list[tuple[int, ScheduledChunk]]] = []
        for row, chunk, place in self._drawing:
            if place or not (chunk.changes_logits or any(chunk.draft_masks)):
                continue
            for index, known in enumerate(chunk.without_drafts()):
                if known.changes_logits:
                    ruled += [[] for _ in range(index + 1 - len(ruled))]
                    ruled[index].append((row + index, known))
        return ruled

    @cached_property
    def single(self) -> np.ndarray:
        """`[2, n]` int64; rows of the chunks that draw one token, which the row decodes next, and
        the indices of these tokens among all drawn ones.
        """
        rows, indices, index = list[int](), list[int](), 0
        for chunk in self._chunks:
            if chunk.draws_for_row:
                rows.append(chunk.row)
                indices.append(index)
            index += len(chunk.draws) + chunk.num_drafts
        return np.array((rows, indices), np.int64)

    def _draw(
        self, scores: Scores, raw: Scores, inputs: torch.Tensor | None
    ) -> Iterator[torch.Tensor]:
        """Yields the tokens, then log-probabilities and details if requested for any chunk."""
        if inputs is None:
            inputs = to_device(self.inputs(), scores.logits.device)
        tokens = draw_sent(scores, self._records, inputs)
        yield tokens
        if self._wants_logprobs:
            yield kernels.token_logprobs(raw.logits, raw.maxima, tokens, inputs[2])
        nums = [chunk.num_logprobs for _, chunk, _ in self._drawing for _ in chunk.draws]
        self._reported = ReportedTokens.among(
            np.array(nums, np.int64),
            np.array(self._rows, np.int64),
            self._records,
            tokens.device,
            is_processed=self._is_processed,
        )
        if self._reported is not None:
            yield from self._reported.compute(scores, raw, tokens)

    def _most_likely(self, logits: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields, per different `num_top`, the most likely tokens and their log-probabilities."""
        for num_top in self._num_tops:
            rows = to_device(np.array(self._rows_of_top(num_top), np.int64), logits.device)
            log_probs = logits[rows].log_softmax(dim=-1)
            values, tokens = log_probs.topk(min(num_top, logits.shape[-1]), dim=-1)
            yield tokens.where(values[:, :1].isfinite(), INVALID_TOKEN)
            yield values

    def _rows_of_top(self, num_top: int) -> list[int]:
        return [row for row, (chunk, _) in enumerate(self._places) if chunk.num_top == num_top]

    def _drawn_outputs(self, tensors: Iterator[torch.Tensor]) -> dict[int, ChunkOutput]:
        """Returns the outputs of the chunks that draw, by row of the scores."""
        outputs: dict[int, ChunkOutput] = {}
        if not self._drawing:
            return outputs
        tokens, start = next(tensors).tolist(), 0
        logprobs = next(tensors).tolist() if self._wants_logprobs else []
        details = self._reported.read((next(tensors), next(tensors))) if self._reported else ()
        for row, chunk, _ in self._drawing:
            part = slice(start, start + len(chunk.draws))
            reported = logprobs[part] if chunk.wants_logprobs else ()
            of_chunk = tuple([detail for detail in details[part] if detail is not None])
            outputs[row] = ChunkOutput(tuple(tokens[part]), tuple(reported), of_chunk)
            start = part.stop
        return outputs

    def _most_likely_outputs(self, tensors: Iterator[torch.Tensor]) -> dict[int, ChunkOutput]:
        """Returns the outputs of the chunks that report likely tokens, by row of the scores."""
        outputs: dict[int, ChunkOutput] = {}
        for num_top in self._num_tops:
            reports = zip(next(tensors).tolist(), next(tensors).tolist(), strict=True)
            for row, (tokens, logprobs) in zip(self._rows_of_top(num_top), reports, strict=True):
                outputs[row] = ChunkOutput(tuple(tokens), tuple(logprobs))
        return outputs


def _accepted(chunk: ScheduledChunk, outputs: Sequence[ChunkOutput]) -> ChunkOutput:
    """Returns the output of a chunk with drafts: of the tokens before a draft that differs from
    what was drawn, and of that token.

    Args:
        chunk: the chunk.
        outputs: of the token after its known ones, and of those after each of its drafts.
    """
    if not chunk.num_drafts:
        return outputs[0]
    drawn = [output.token_ids[0] for output in outputs]
    num_equal = num_leading_equal(drawn, chunk.token_ids[-chunk.num_drafts :])
    is_valid = drawn[num_equal] >= 0
    # Without a valid token, the step that runs the last equal one will find that again.
    kept = outputs[: max(1, num_equal + is_valid)]
    return ChunkOutput(
        tuple(drawn[: len(kept)]),
        tuple(chain.from_iterable(output.logprobs for output in kept)),
        tuple(chain.from_iterable(output.details for output in kept)),
    )
