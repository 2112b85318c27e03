"""Turns a `ScheduledBatch` into the tensors of one forward pass."""

from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch

from engine.batch import ScheduledBatch
from engine.runtime.device import to_device
from engine.runtime.rows import Rows
from kernels import AskingTokens, AttentionMetadata

__all__ = ["BatchInputs", "build_batch_inputs"]


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
    asking: AskingTokens | None

    @property
    def num_asking(self) -> int:
        """Tokens to compute logits of."""
        return len(self.token_ids if self.asking is None else self.asking.rows)


def build_batch_inputs(
    batch: ScheduledBatch,
    rows: Rows,
    decode_rows: np.ndarray,
    block_size: int,
    device: torch.device,
) -> BatchInputs:
    """Lays the batch's sequences end to end.

    Args:
        batch: the step.
        rows: as they are before the step, but with its table updates.
        decode_rows: the batch's, as an array.
        block_size: tokens per KV block.
        device: where the tensors shall be.
    """
    chunks = batch.chunks
    row_ids = _after([chunk.row for chunk in chunks], decode_rows)
    starts = _after([chunk.start_position for chunk in chunks], rows.positions[decode_rows])
    query_lens = _after([chunk.num_tokens for chunk in chunks], np.ones_like(decode_rows))
    context_lens = starts + query_lens
    num_columns = -(-int(context_lens.max()) // block_size)
    query_starts = np.zeros(len(row_ids) + 1, np.int32)
    np.cumsum(query_lens, out=query_starts[1:])
    known_tokens = list(chain.from_iterable(chunk.token_ids for chunk in chunks))
    # Which sequence token t belongs to, and its position there: both [num_tokens].
    sequence_of = np.repeat(np.arange(len(row_ids)), query_lens)
    positions = np.arange(query_starts[-1]) + (starts - query_starts[:-1])[sequence_of]
    sequences = _Sequences(
        tables=np.take(rows.tables[:, :, :num_columns], row_ids, axis=1),
        query_starts=query_starts,
        context_lens=context_lens.astype(np.int32),
    )
    slots = _slots_of(sequences.tables, sequence_of, positions, block_size)
    asking = [index for index, chunk in enumerate(chunks) if chunk.needs_logits]
    asking_ids = _after(asking, np.arange(len(chunks), len(row_ids)))
    return BatchInputs(
        token_ids=to_device(_after(known_tokens, rows.last_tokens[decode_rows]), device),
        positions=to_device(positions, device),
        groups=_attention_metadata(sequences, slots, device),
        asking=_asking_tokens(sequences, slots, asking_ids, device),
    )


@dataclass(frozen=True, slots=True)
class _Sequences:
    """A step's sequences; see `AttentionMetadata`.

    Attributes:
        tables: `[num_groups, num_seqs, max_blocks]` int32.
        query_starts: `[num_seqs + 1]` int32.
        context_lens: `[num_seqs]` int32.
    """

    tables: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray


def _slots_of(
    tables: np.ndarray, sequence_of: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """Where the KV of tokens goes, `[num_groups, num_tokens]` int64."""
    block_ids = tables[:, sequence_of, positions // block_size].astype(np.int64)
    # Indexed so, the array would have its groups innermost.
    return np.ascontiguousarray(block_ids * block_size + positions % block_size)


def _asking_tokens(
    sequences: _Sequences, slots: np.ndarray, asking_ids: np.ndarray, device: torch.device
) -> AskingTokens | None:
    """The last tokens of the sequences `asking_ids`, which rise; None if those are all tokens."""
    num_asking = len(asking_ids)
    if num_asking == slots.shape[1]:
        return None
    token_rows = sequences.query_starts[1:][asking_ids].astype(np.int64) - 1
    alone = _Sequences(
        tables=np.take(sequences.tables, asking_ids, axis=1),
        query_starts=np.arange(num_asking + 1, dtype=np.int32),
        context_lens=sequences.context_lens[asking_ids],
    )
    own_slots = np.take(slots, token_rows, axis=1)
    groups = _attention_metadata(alone, own_slots, device)
    return AskingTokens(to_device(token_rows, device), groups)


def _attention_metadata(
    sequences: _Sequences, slots: np.ndarray, device: torch.device
) -> tuple[AttentionMetadata, ...]:
    """One per layer group."""
    query_starts, context_lens = sequences.query_starts, sequences.context_lens
    for_group = partial(
        AttentionMetadata,
        query_starts=to_device(query_starts, device),
        context_lens=to_device(context_lens, device),
        max_query_len=int(np.diff(query_starts).max(initial=0)),
        max_context_len=int(context_lens.max(initial=0)),
    )
    tables = to_device(sequences.tables, device)
    return tuple(
        for_group(block_tables=group_tables, slot_mapping=group_slots)
        for group_tables, group_slots in zip(tables, to_device(slots, device), strict=True)
    )


def _after(of_chunks: list[int], of_decode_rows: np.ndarray) -> np.ndarray:
    """`[num_chunks + num_decode_rows]`, or what else both have, int64."""
    if not of_chunks:
        return of_decode_rows
    return np.concatenate((np.array(of_chunks, np.int64), of_decode_rows))
