"""Turns a `ScheduledBatch` into the tensors of one forward pass."""

from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch

from engine.batch import ScheduledBatch
from engine.runtime.device import to_device
from engine.runtime.rows import Rows
from kernels import AttentionMetadata, LogitRows

__all__ = ["BatchInputs", "StepInputs"]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """What one step feeds the model: the chunks' sequences, then the decode rows', end to end.

    Attributes:
        token_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64.
        groups: which KV to write and read, per layer group.
        asking: the tokens to compute logits of: the last ones of chunks that ask for
            something, then those of the decode rows. None if that is all tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[AttentionMetadata, ...]
    asking: LogitRows | None


class StepInputs:
    """The inputs of one step after the other, in memory that stays where it is.

    Args:
        rows: whose steps, or others as many.
        max_tokens: the most tokens of a step.
        block_size: tokens per KV block.
        device: where the tensors shall be.

    Attributes:
        max_seqs: the most sequences of a step.
        num_tokens: of the step; 0 before the first, as the others.
        num_seqs: its sequences.
        num_asking: tokens to compute logits of.
    """

    def __init__(self, rows: Rows, max_tokens: int, block_size: int, device: torch.device) -> None:
        self.max_seqs = num_rows = rows.tables.shape[1]
        self._block_size, self._device = block_size, device
        self._count = np.arange(max(max_tokens, num_rows + 1))
        self._ones = np.ones(num_rows, np.int64)
        self._token_ids = np.zeros(max_tokens, np.int64)
        self._positions = np.zeros(max_tokens, np.int64)
        self._sequences = _Sequences(rows, max_tokens)
        self._asking_rows = np.zeros(num_rows, np.int64)
        self._asking = _Sequences(rows, num_rows)
        self._num_columns = 0
        self.num_tokens = self.num_seqs = self.num_asking = 0

    def fill(self, batch: ScheduledBatch, rows: Rows, decode_rows: np.ndarray) -> None:
        """Lays a batch's sequences end to end.

        Args:
            batch: the step.
            rows: as they are before the step, but with its table updates.
            decode_rows: the batch's, as an array.
        """
        chunks = batch.chunks
        row_ids = _after([chunk.row for chunk in chunks], decode_rows)
        starts = _after([chunk.start_position for chunk in chunks], rows.positions[decode_rows])
        known_tokens = list(chain.from_iterable(chunk.token_ids for chunk in chunks))
        token_ids = _after(known_tokens, rows.last_tokens[decode_rows])
        self.num_tokens, self.num_seqs = len(token_ids), len(row_ids)
        self._token_ids[: self.num_tokens] = token_ids
        query_lens = _after([chunk.num_tokens for chunk in chunks], self._ones[: len(decode_rows)])
        self._place(row_ids, starts, query_lens, rows.tables)
        asking = [index for index, chunk in enumerate(chunks) if chunk.needs_logits]
        self.num_asking = len(asking) + len(decode_rows)
        if self.num_asking < self.num_tokens:
            self._ask(_after(asking, self._count[len(chunks) : self.num_seqs]))

    def tensors(self) -> BatchInputs:
        """The step's; on the CPU they share the memory, and change with it."""
        num_tokens, num_asking = self.num_tokens, self.num_asking
        asking = None
        if num_asking < num_tokens:
            asking = LogitRows(
                to_device(self._asking_rows[:num_asking], self._device),
                self._asking.metadata(num_asking, num_asking, self._num_columns, self._device),
            )
        return BatchInputs(
            token_ids=to_device(self._token_ids[:num_tokens], self._device),
            positions=to_device(self._positions[:num_tokens], self._device),
            groups=self._sequences.metadata(
                self.num_seqs, num_tokens, self._num_columns, self._device
            ),
            asking=asking,
        )

    def _place(
        self, row_ids: np.ndarray, starts: np.ndarray, query_lens: np.ndarray, tables: np.ndarray
    ) -> None:
        """Says where the sequences are: in the step, in their contexts, in the pool."""
        num_tokens, num_seqs, count = self.num_tokens, self.num_seqs, self._count
        whole, positions = self._sequences, self._positions[:num_tokens]
        query_starts = whole.query_starts[: num_seqs + 1]
        # Which sequence token t belongs to: [num_tokens].
        if num_tokens == num_seqs:
            sequence_of = count[:num_seqs]
            query_starts[:] = count[: num_seqs + 1]
            positions[:] = starts
        else:
            sequence_of = np.repeat(count[:num_seqs], query_lens)
            np.cumsum(query_lens, out=query_starts[1:])
            positions[:] = count[:num_tokens] + (starts - query_starts[:-1])[sequence_of]
        context_lens = whole.context_lens[:num_seqs]
        context_lens[:] = starts + query_lens
        self._num_columns = -(-int(context_lens.max()) // self._block_size)
        own_tables = tables[:, row_ids, : self._num_columns]
        whole.tables[:, :num_seqs, : self._num_columns] = own_tables
        blocks, offsets = np.divmod(positions, self._block_size)
        slots = whole.slots[:, :num_tokens]
        slots[:] = own_tables[:, sequence_of, blocks]
        slots *= self._block_size
        slots += offsets

    def _ask(self, asking_ids: np.ndarray) -> None:
        """Makes sequences of their own of the last tokens of the sequences `asking_ids`."""
        whole, alone, num_asking = self._sequences, self._asking, len(asking_ids)
        token_rows = self._asking_rows[:num_asking]
        token_rows[:] = whole.query_starts[1:][asking_ids] - 1
        columns = slice(self._num_columns)
        alone.tables[:, :num_asking, columns] = whole.tables[:, asking_ids, columns]
        alone.query_starts[: num_asking + 1] = self._count[: num_asking + 1]
        alone.context_lens[:num_asking] = whole.context_lens[asking_ids]
        alone.slots[:, :num_asking] = whole.slots[:, token_rows]


class _Sequences:
    """Memory for `AttentionMetadata` of a step's sequences, all groups'.

    Args:
        rows: how many sequences, groups and blocks there may be.
        max_tokens: the most tokens.

    Attributes:
        tables: `[num_groups, max_seqs, max_blocks]` int32.
        query_starts: `[max_seqs + 1]` int32.
        context_lens: `[max_seqs]` int32.
        slots: `[num_groups, max_tokens]` int64.
    """

    def __init__(self, rows: Rows, max_tokens: int) -> None:
        num_groups, max_seqs, _ = rows.tables.shape
        self.tables = np.zeros_like(rows.tables)
        self.query_starts = np.zeros(max_seqs + 1, np.int32)
        self.context_lens = np.zeros(max_seqs, np.int32)
        self.slots = np.zeros((num_groups, max_tokens), np.int64)

    def metadata(
        self, num_seqs: int, num_tokens: int, num_columns: int, device: torch.device
    ) -> tuple[AttentionMetadata, ...]:
        """One per layer group."""
        query_starts = self.query_starts[: num_seqs + 1]
        context_lens = self.context_lens[:num_seqs]
        for_group = partial(
            AttentionMetadata,
            query_starts=to_device(query_starts, device),
            context_lens=to_device(context_lens, device),
            max_query_len=int(np.diff(query_starts).max(initial=0)),
            max_context_len=int(context_lens.max(initial=0)),
        )
        tables = to_device(self.tables[:, :num_seqs, :num_columns], device)
        slots = to_device(self.slots[:, :num_tokens], device)
        return tuple(
            for_group(block_tables=group_tables, slot_mapping=group_slots)
            for group_tables, group_slots in zip(tables, slots, strict=True)
        )


def _after(of_chunks: list[int], of_decode_rows: np.ndarray) -> np.ndarray:
    """`[num_chunks + num_decode_rows]`, or what else both have, int64."""
    if not of_chunks:
        return of_decode_rows
    return np.concatenate((np.array(of_chunks, np.int64), of_decode_rows))
