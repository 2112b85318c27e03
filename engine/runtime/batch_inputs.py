"""Turns a `ScheduledBatch` into the tensors of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.batch import DrawParams, ScheduledBatch, ScheduledSequence
from kernels.attention_metadata import AttentionMetadata

__all__ = ["BatchInputs", "build_batch_inputs"]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """What one step feeds the model and the sampler.

    Attributes:
        token_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64.
        meta: which KV to write and read.
        draw_rows: `[num_draws]` int64; rows of the model's output to draw from.
        draws: how, per row.
        draw_positions: position of the token to draw, per row.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    meta: AttentionMetadata
    draw_rows: torch.Tensor
    draws: tuple[DrawParams, ...]
    draw_positions: tuple[int, ...]


def build_batch_inputs(batch: ScheduledBatch, block_size: int, device: torch.device) -> BatchInputs:
    """Lays the batch's sequences end to end.

    Args:
        batch: the step.
        block_size: tokens per KV block.
        device: where the tensors shall be.
    """
    sequences = batch.sequences
    query_lens = np.array([sequence.num_tokens for sequence in sequences])
    starts = np.array([sequence.start_position for sequence in sequences])
    query_starts = np.concatenate(([0], np.cumsum(query_lens)))  # [num_seqs + 1]
    context_lens = starts + query_lens
    num_tokens = int(query_starts[-1])
    # Row of token t's sequence, and token t's position in it: both [num_tokens].
    sequence_of = np.repeat(np.arange(len(sequences)), query_lens)
    positions = np.arange(num_tokens) + (starts - query_starts[:-1])[sequence_of]
    tables = _block_tables(sequences, -(-int(context_lens.max()) // block_size))
    slots = tables[sequence_of, positions // block_size] * block_size + positions % block_size
    token_ids = chain.from_iterable(sequence.token_ids for sequence in sequences)
    drawing = [row for row, sequence in enumerate(sequences) if sequence.draw is not None]
    return BatchInputs(
        token_ids=_to_device(np.fromiter(token_ids, np.int64, num_tokens), device),
        positions=_to_device(positions, device),
        meta=AttentionMetadata(
            block_tables=_to_device(tables.astype(np.int32), device),
            query_starts=_to_device(query_starts.astype(np.int32), device),
            context_lens=_to_device(context_lens.astype(np.int32), device),
            slot_mapping=_to_device(slots, device),
            max_query_len=int(query_lens.max()),
            max_context_len=int(context_lens.max()),
        ),
        draw_rows=_to_device(query_starts[1:][drawing] - 1, device),
        draws=tuple(sequence.draw for sequence in sequences if sequence.draw is not None),
        draw_positions=tuple(context_lens[drawing].tolist()),
    )


def _block_tables(sequences: Sequence[ScheduledSequence], max_blocks: int) -> np.ndarray:
    """The sequences' first `max_blocks` block ids: `[num_seqs, max_blocks]`, padded with 0."""
    tables = np.zeros((len(sequences), max_blocks), np.int64)
    for row, sequence in zip(tables, sequences, strict=True):
        table = sequence.block_table[:max_blocks]
        row[: len(table)] = table
    return tables


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
