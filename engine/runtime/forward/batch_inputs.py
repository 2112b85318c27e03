"""Turns a `ScheduledBatch` into the tensors of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch

from engine.batch import ScheduledBatch
from engine.models.layers import KeptStates
from engine.runtime.device import to_device
from engine.runtime.draws.rows import Rows
from kernels import AttentionMetadata, LogitRows

__all__ = ["BatchInputs", "KeptMemory", "StepInputs"]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The model's inputs in one step: the chunks' sequences, then the decode rows', end to end.

    Attributes:
        token_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64.
        layer_groups: per layer group, the KV to write and read.
        logit_rows: the tokens whose logits are computed: of each chunk that needs logits the last
            known token and the drafts, then those of the decode rows. None for all tokens.
        hidden_rows: `[num_logit_rows]` int64; the same tokens, in a step in which the model
            computes the hidden states of all tokens. None in other steps.
        hidden: `[num_tokens, hidden_size]`; hidden states of the stage before; None for the first.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    layer_groups: tuple[AttentionMetadata, ...]
    logit_rows: LogitRows | None
    hidden_rows: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @property
    def of_model(self) -> torch.Tensor:
        """The model's input: token ids, or the hidden states of the stage before."""
        return self.token_ids if self.hidden is None else self.hidden

    def logit_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns those of the model's final hidden states whose logits are computed."""
        return hidden if self.hidden_rows is None else hidden.index_select(0, self.hidden_rows)


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory for the hidden states of logit rows that steps keep.

    Attributes:
        layers: as in `KeptStates`.
        memory: `[len(layers), max_logit_rows, hidden_size]`.
        count: `[max_logit_rows]` int64; 0, 1, 2 and so on.
    """

    layers: Sequence[int]
    memory: torch.Tensor
    count: torch.Tensor

    @classmethod
    def allocate(
        cls,
        layers: Sequence[int],
        num_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KeptMemory":
        """Allocates memory for steps of up to `num_rows` logit rows."""
        memory = torch.empty((len(layers), num_rows, hidden_size), dtype=dtype, device=device)
        return cls(layers, memory, torch.arange(num_rows, device=device))

    def states_of(self, inputs: BatchInputs, num_rows: int) -> KeptStates:
        """Returns what the model keeps in a step.

        Args:
            inputs: the step's.
            num_rows: number of its logit rows.
        """
        count = self.count[:num_rows]
        rows = count if inputs.logit_rows is None else inputs.logit_rows.rows
        final_rows = count
        if inputs.hidden_rows is not None:  # the final states of all tokens are computed
            rows = final_rows = inputs.hidden_rows
        return KeptStates(self.layers, self.memory[:, :num_rows], rows, final_rows)


class StepInputs:
    """Builds the inputs of successive steps in the same memory.

    Args:
        rows: rows of the shape that later calls of `fill` pass.
        max_tokens: maximum number of tokens in a step.
        block_size: tokens per KV block.
        device: the device of the tensors.
        hidden: `[max_tokens, hidden_size]`; memory for the hidden states of the stage before, which
            the caller fills; None for the first stage.
        max_drafts: maximum number of drafts of a sequence.
        has_states: whether the model has recurrent layers, which must not keep states behind draft
            tokens.

    Attributes:
        max_logit_rows: maximum number of tokens whose logits are computed in a step.
        num_tokens: number of tokens in the step; 0 before the first step.
        num_seqs: number of sequences in the step; 0 before the first step.
        num_logit_rows: number of tokens whose logits are computed; 0 before the first step.
        needs_all_hidden: whether the step needs the final hidden states of all its tokens, for
            log-probabilities of prompts.
    """

    needs_all_hidden: bool = False

    def __init__(
        self,
        rows: Rows,
        max_tokens: int,
        block_size: int,
        device: torch.device,
        hidden: torch.Tensor | None = None,
        max_drafts: int = 0,
        *,
        has_states: bool = False,
    ) -> None:
        self._hidden = hidden
        num_rows = rows.tables.shape[1]
        self.max_logit_rows = min(num_rows * (1 + max_drafts), max(num_rows, max_tokens))
        self._block_size, self._device = block_size, device
        self._count = np.arange(max(max_tokens, num_rows) + 1)
        self._ones, self._zeros = np.ones(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self._token_ids = np.zeros(max_tokens, np.int64)
        self._positions = np.zeros(max_tokens, np.int64)
        self._sequences = _Sequences(rows, num_rows, max_tokens, has_states=has_states)
        self._logit_rows = np.zeros(self.max_logit_rows, np.int64)
        self._logit_sequences = _Sequences(rows, self.max_logit_rows, self.max_logit_rows)
        self._num_columns = 0
        self.num_tokens = self.num_seqs = self.num_logit_rows = 0

    def fill(self, batch: ScheduledBatch, rows: Rows, decode_rows: np.ndarray) -> None:
        """Lays a batch's sequences end to end.

        Args:
            batch: the step.
            rows: the rows before the step, with its table updates applied.
            decode_rows: the batch's `decode_rows` as an int64 array.
        """
        chunks = batch.chunks
        row_ids = _concatenated([chunk.row for chunk in chunks], decode_rows)
        starts = _concatenated(
            [chunk.start_position for chunk in chunks], rows.positions[decode_rows]
        )
        known_tokens = list(chain.from_iterable(chunk.token_ids for chunk in chunks))
        token_ids = _concatenated(known_tokens, rows.last_tokens[decode_rows])
        self.num_tokens, self.num_seqs = len(token_ids), len(row_ids)
        self._token_ids[: self.num_tokens] = token_ids
        query_lens = _concatenated(
            [chunk.num_tokens for chunk in chunks], self._ones[: len(decode_rows)]
        )
        self._fill_sequences(row_ids, starts, query_lens, rows.tables)
        if self._sequences.num_unkept is not None:
            self._sequences.num_unkept[: self.num_seqs] = _concatenated(
                [chunk.num_drafts for chunk in chunks], self._zeros[: len(decode_rows)]
            )
        self.needs_all_hidden = batch.reports_prompts
        needing_logits = [
            (index, num_after)
            for index, chunk in enumerate(chunks)
            if chunk.needs_logits
            for num_after in range(chunk.num_drafts, -1, -1)
        ]
        self.num_logit_rows = len(needing_logits) + len(decode_rows)
        if self.num_logit_rows < self.num_tokens:
            of_decode_rows = self._count[len(chunks) : self.num_seqs]
            self._fill_logit_rows(
                _concatenated([index for index, _ in needing_logits], of_decode_rows),
                _concatenated([num for _, num in needing_logits], self._zeros[: len(decode_rows)]),
            )

    def tensors(self) -> BatchInputs:
        """Returns the step's inputs; on a CPU as views of memory that `fill` overwrites."""
        num_tokens, num_logit_rows = self.num_tokens, self.num_logit_rows
        logit_rows = hidden_rows = None
        if num_logit_rows < num_tokens:
            rows = to_device(self._logit_rows[:num_logit_rows], self._device)
            if self.needs_all_hidden:
                hidden_rows = rows
            else:
                sequences = self._logit_sequences.metadata(
                    num_logit_rows, num_logit_rows, self._num_columns, self._device
                )
                logit_rows = LogitRows(rows, sequences)
        return BatchInputs(
            token_ids=to_device(self._token_ids[:num_tokens], self._device),
            positions=to_device(self._positions[:num_tokens], self._device),
            layer_groups=self._sequences.metadata(
                self.num_seqs, num_tokens, self._num_columns, self._device
            ),
            logit_rows=logit_rows,
            hidden_rows=hidden_rows,
            hidden=None if self._hidden is None else self._hidden[:num_tokens],
        )

    def _fill_sequences(
        self, row_ids: np.ndarray, starts: np.ndarray, query_lens: np.ndarray, tables: np.ndarray
    ) -> None:
        """Computes each token's position and slot, and each sequence's length and block table."""
        num_tokens, num_seqs, count = self.num_tokens, self.num_seqs, self._count
        whole, positions = self._sequences, self._positions[:num_tokens]
        query_starts = whole.query_starts[: num_seqs + 1]
        # sequence_of: index of each token's sequence, [num_tokens].
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

    def _fill_logit_rows(self, seq_ids: np.ndarray, num_after: np.ndarray) -> None:
        """Fills sequences of one token each.

        Args:
            seq_ids: `[num_logit_rows]` int64; per token, the sequence that it is of.
            num_after: `[num_logit_rows]` int64; how many tokens of that sequence are after it.
        """
        whole, alone, num_logit_rows = self._sequences, self._logit_sequences, len(seq_ids)
        token_rows = self._logit_rows[:num_logit_rows]
        token_rows[:] = whole.query_starts[1:][seq_ids] - 1 - num_after
        columns = slice(self._num_columns)
        alone.tables[:, :num_logit_rows, columns] = whole.tables[:, seq_ids, columns]
        alone.query_starts[: num_logit_rows + 1] = self._count[: num_logit_rows + 1]
        alone.context_lens[:num_logit_rows] = whole.context_lens[seq_ids] - num_after
        alone.slots[:, :num_logit_rows] = whole.slots[:, token_rows]


class _Sequences:
    """Memory for the `AttentionMetadata` of a step's sequences, for all layer groups.

    Args:
        rows: rows with as many layer groups and blocks as `tables`.
        max_seqs: maximum number of sequences in a step.
        max_tokens: maximum number of tokens in a step.

    Attributes:
        tables: `[num_layer_groups, max_seqs, max_blocks]` int32.
        query_starts: `[max_seqs + 1]` int32.
        context_lens: `[max_seqs]` int32.
        slots: `[num_layer_groups, max_tokens]` int64.
        num_unkept: `[max_seqs]` int32; None for a model without states.
    """

    def __init__(
        self, rows: Rows, max_seqs: int, max_tokens: int, *, has_states: bool = False
    ) -> None:
        num_layer_groups, _, max_blocks = rows.tables.shape
        self.tables = np.zeros((num_layer_groups, max_seqs, max_blocks), rows.tables.dtype)
        self.query_starts = np.zeros(max_seqs + 1, np.int32)
        self.context_lens = np.zeros(max_seqs, np.int32)
        self.slots = np.zeros((num_layer_groups, max_tokens), np.int64)
        self.num_unkept = np.zeros(max_seqs, np.int32) if has_states else None

    def metadata(
        self, num_seqs: int, num_tokens: int, num_columns: int, device: torch.device
    ) -> tuple[AttentionMetadata, ...]:
        """Returns the metadata of each layer group."""
        query_starts = self.query_starts[: num_seqs + 1]
        context_lens, unkept = self.context_lens[:num_seqs], self.num_unkept
        for_group = partial(
            AttentionMetadata,
            query_starts=to_device(query_starts, device),
            context_lens=to_device(context_lens, device),
            max_query_len=int(np.diff(query_starts).max(initial=0)),
            max_context_len=int(context_lens.max(initial=0)),
            num_unkept=None if unkept is None else to_device(unkept[:num_seqs], device),
        )
        tables = to_device(self.tables[:, :num_seqs, :num_columns], device)
        slots = to_device(self.slots[:, :num_tokens], device)
        return tuple(
            for_group(block_tables=tables_of_group, slot_mapping=slots_of_group)
            for tables_of_group, slots_of_group in zip(tables, slots, strict=True)
        )


def _concatenated(of_chunks: list[int], of_decode_rows: np.ndarray) -> np.ndarray:
    """Returns the chunks' values followed by the decode rows' values, as int64."""
    if not of_chunks:
        return of_decode_rows
    return np.concatenate((np.array(of_chunks, np.int64), of_decode_rows))
