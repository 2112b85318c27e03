"""`SentStep`: a step's sequences as numbers for the device; `BegunStep`: a step that was sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.batch import ScheduledBatch, ScheduledChunk
from engine.runtime.draws.rows import Rows
from engine.runtime.forward.flashinfer_attention import HostSequences
from engine.runtime.steps.step_shapes import StepShape

__all__ = ["BegunStep", "SentStep"]

_OF_THE_ROW = -1  # a position or a token that the device knows


class SentStep:
    """The sequences of a step: chunks, then rows that decode, end to end.

    Args:
        batch: the step.
        decode_ids: its `decode_rows`, `[n]` int64.
        max_context_len: most tokens of a context of the step.
        has_logits: whether the stage computes logits.

    Attributes:
        shape: the step's sizes.
    """

    def __init__(
        self,
        batch: ScheduledBatch,
        decode_ids: np.ndarray,
        max_context_len: int,
        *,
        has_logits: bool = True,
    ) -> None:
        chunks = self._chunks = batch.chunks
        self._decode_ids, num_decodes = decode_ids, len(decode_ids)
        self._query_lens = [chunk.num_tokens for chunk in chunks]
        num_logit_rows = num_decodes if has_logits else 0
        if has_logits:
            num_logit_rows += sum([1 + c.num_drafts for c in chunks if c.needs_logits])
        num_tokens = sum(self._query_lens) + num_decodes
        self.shape = StepShape(
            num_tokens=num_tokens,
            num_seqs=len(chunks) + num_decodes,
            num_logit_rows=num_logit_rows,
            max_query_len=max(self._query_lens, default=1),
            max_context_len=max_context_len,
            has_logit_rows=has_logits and num_logit_rows < num_tokens,
        )

    def words(self, shape: StepShape, spare_row: int) -> np.ndarray:
        """Returns the words of `SentSequences`. With `StepShape.has_logit_rows` the tokens whose
        logits are computed follow, and the words of these tokens as sequences of their own.

        Args:
            shape: the step's, or one that it is padded to.
            spare_row: the row that runs the padding.
        """
        num_seqs, num_chunks = self.shape.num_seqs, len(self._chunks)
        row_ids = np.full(shape.num_seqs, spare_row)
        row_ids[:num_chunks] = [chunk.row for chunk in self._chunks]
        row_ids[num_chunks:num_seqs] = self._decode_ids
        starts = np.zeros(shape.num_seqs, np.int64)
        starts[:num_chunks] = [chunk.start_position for chunk in self._chunks]
        starts[num_chunks:num_seqs] = _OF_THE_ROW
        num_unkept = np.zeros(shape.num_seqs, np.int64)
        num_unkept[:num_chunks] = [chunk.num_drafts for chunk in self._chunks]
        query_starts = self._query_starts(shape)
        words = [row_ids, starts, query_starts, num_unkept, self._token_ids(shape)]
        if shape.has_logit_rows:
            words += self._logit_rows(shape, query_starts, spare_row)
        return np.concatenate(words)

    def on_host(self, rows: Rows) -> HostSequences:
        """Returns the sequences with the lengths of their contexts.

        Args:
            rows: the rows before the step, with its table updates applied.
        """
        ids = np.array([chunk.row for chunk in self._chunks], np.int64)
        context_lens = np.concatenate((self._chunk_ends(), 1 + rows.positions[self._decode_ids]))
        return HostSequences(
            self._query_starts(self.shape).astype(np.int32),
            context_lens.astype(np.int32),
            rows.tables[:, np.concatenate((ids, self._decode_ids))],
        )

    def _chunk_ends(self) -> np.ndarray:
        """Returns the position after the last token of each chunk, draft tokens included."""
        return np.array([c.start_position + c.num_tokens for c in self._chunks], np.int64)

    def _query_starts(self, shape: StepShape) -> np.ndarray:
        """Returns where each sequence's tokens start, and their end; the padding is divided among
        the sequences behind those of the step.
        """
        starts = np.zeros(shape.num_seqs + 1, np.int64)
        num_seqs, lens = self.shape.num_seqs, starts[1:]
        lens[: len(self._chunks)] = self._query_lens
        lens[len(self._chunks) : num_seqs] = 1
        num_padding, longest = shape.num_tokens - self.shape.num_tokens, shape.max_query_len
        before = longest * np.arange(shape.num_seqs - num_seqs)
        lens[num_seqs:] = np.clip(num_padding - before, 0, longest)
        np.cumsum(lens, out=lens)
        return starts

    def _token_ids(self, shape: StepShape) -> np.ndarray:
        token_ids = np.zeros(shape.num_tokens, np.int64)
        num_known = self.shape.num_tokens - len(self._decode_ids)
        known = chain.from_iterable(chunk.token_ids for chunk in self._chunks)
        token_ids[:num_known] = np.fromiter(known, np.int64, num_known)
        token_ids[num_known : self.shape.num_tokens] = _OF_THE_ROW
        return token_ids

    def _logit_rows(
        self, shape: StepShape, query_starts: np.ndarray, spare_row: int
    ) -> Sequence[np.ndarray]:
        """Returns the indices of the tokens whose logits are computed, and the attributes of
        `SentSequences` of these tokens.
        """
        count, num_decodes = shape.num_logit_rows, len(self._decode_ids)
        places = list(_logit_places(self._chunks))
        num_chunk_rows, num_rows = len(places), self.shape.num_logit_rows
        token_rows = np.full(count, shape.num_tokens - 1)
        row_ids, starts = np.full(count, spare_row), np.zeros(count, np.int64)
        if places:
            indices, num_after = np.array(places, np.int64).T
            token_rows[:num_chunk_rows] = query_starts[indices + 1] - 1 - num_after
            row_ids[:num_chunk_rows] = [self._chunks[index].row for index, _ in places]
            starts[:num_chunk_rows] = self._chunk_ends()[indices] - 1 - num_after
        num_known = self.shape.num_tokens - num_decodes
        token_rows[num_chunk_rows:num_rows] = num_known + np.arange(num_decodes)
        row_ids[num_chunk_rows:num_rows] = self._decode_ids
        starts[num_chunk_rows:num_rows] = _OF_THE_ROW
        zeros = np.zeros(count, np.int64)
        return token_rows, row_ids, starts, np.arange(count + 1), zeros, zeros


def _logit_places(chunks: Sequence[ScheduledChunk]) -> list[tuple[int, int]]:
    """Returns (index of the chunk, number of its tokens behind) of the tokens of chunks whose
    logits are computed.
    """
    return [
        (index, num_after)
        for index, chunk in enumerate(chunks)
        if chunk.needs_logits
        for num_after in range(chunk.num_drafts, -1, -1)
    ]


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step that was sent to the device.

    Attributes:
        number: of the batch.
        decode_rows: the batch's.
        shape: of its forward pass.
        is_captured: whether there is a graph of this shape.
        num_tokens: tokens of the step, without padding.
        num_logit_rows: tokens whose logits are computed, without padding.
        decode_tokens: places of the tokens of the rows that decode.
        decode_seqs: places of the sequences of these rows.
        draw_inputs: `ChunkDraws.inputs` on the device.
        single: `ChunkDraws.single` on the device.
        on_host: the sequences, of a step that FlashInfer plans; None for others.
    """

    number: int
    decode_rows: tuple[int, ...]
    shape: StepShape
    is_captured: bool
    num_tokens: int
    num_logit_rows: int
    decode_tokens: slice
    decode_seqs: slice
    draw_inputs: torch.Tensor
    single: torch.Tensor
    on_host: HostSequences | None = None

    @classmethod
    def of(
        cls,
        batch: ScheduledBatch,
        shape: StepShape,
        captured: StepShape | None,
        num_decodes: int,
        draw_inputs: torch.Tensor,
        single: torch.Tensor,
        on_host: HostSequences | None = None,
    ) -> "BegunStep":
        """Returns the step of a batch with the sizes `shape`, padded to `captured` unless None."""
        return cls(
            number=batch.step,
            decode_rows=batch.decode_rows,
            shape=captured or shape,
            is_captured=captured is not None,
            num_tokens=shape.num_tokens,
            num_logit_rows=shape.num_logit_rows,
            decode_tokens=slice(shape.num_tokens - num_decodes, shape.num_tokens),
            decode_seqs=slice(shape.num_seqs - num_decodes, shape.num_seqs),
            draw_inputs=draw_inputs,
            single=single,
            on_host=on_host,
        )
