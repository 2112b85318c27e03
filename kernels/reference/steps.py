"""Inputs of steps, the state of their rows, and recorded steps, in plain torch."""

from collections.abc import Callable

import torch

from kernels.dispatch import kernel
from kernels.paged_kv import AttentionMetadata
from kernels.recorded_step import Arena, RecordedStep
from kernels.row_state import RowState, SentSequences, SequenceInputs

__all__ = [
    "keep_drawn",
    "lay_out_sequences",
    "mark_step",
    "point_to",
    "record_step",
    "write_table_entries",
]


@kernel("rows.positions.device")
def lay_out_sequences(
    rows: RowState, sent: SentSequences, block_size: int, inputs: SequenceInputs
) -> None:
    """Writes the inputs of a step's sequences, of which the host does not know all.

    Args:
        rows: the state after the previous step. The tables hold the blocks of the next tokens.
        sent: the sequences.
        block_size: tokens per KV block.
        inputs: for as many sequences and tokens; all fields are written.
    """
    row_ids, query_starts = sent.row_ids, sent.query_starts
    own_positions = rows.positions.index_select(0, row_ids)
    starts = sent.starts.where(sent.starts >= 0, own_positions)
    tokens = torch.arange(len(sent.token_ids), device=row_ids.device)
    sequence_of = torch.searchsorted(query_starts, tokens, right=True) - 1  # [t]
    positions = tokens - query_starts[:-1].index_select(0, sequence_of)
    positions = positions + starts.index_select(0, sequence_of)
    last_tokens = rows.last_tokens.index_select(0, row_ids).index_select(0, sequence_of)
    tables = rows.tables.index_select(1, row_ids)  # [num_layer_groups, n, max_blocks]
    own_blocks = tables[:, sequence_of, positions // block_size]  # [num_layer_groups, t]
    inputs.token_ids.copy_(sent.token_ids.where(sent.token_ids >= 0, last_tokens))
    inputs.positions.copy_(positions)
    inputs.draw_positions.copy_(positions + 1)
    inputs.query_starts.copy_(query_starts)
    inputs.context_lens.copy_(starts + query_starts.diff())
    inputs.num_unkept.copy_(sent.num_unkept)
    inputs.tables.copy_(tables)
    inputs.slots.copy_(own_blocks.long() * block_size + positions % block_size)


@kernel("rows.positions.device")
def keep_drawn(rows: RowState, row_ids: torch.Tensor, tokens: torch.Tensor) -> None:
    """Advances rows by the token that each has drawn.

    The next step may be launched before the host has seen that a token is invalid; such a row
    continues with token 0.

    Args:
        rows: changed in place.
        row_ids: `[n]` int64, all different.
        tokens: `[n]` int64.
    """
    rows.positions.index_add_(0, row_ids, torch.ones_like(row_ids))
    rows.last_tokens.index_copy_(0, row_ids, tokens.clamp(min=0))


@kernel("tables.device")
def write_table_entries(
    tables: torch.Tensor, indices: torch.Tensor, block_ids: torch.Tensor
) -> None:
    """Writes block ids into `RowState.tables`.

    Args:
        tables: `[num_layer_groups, num_rows, max_blocks]` int32, contiguous.
        indices: `[k]` int64, all different; row-major indices of the entries.
        block_ids: `[k]` int32.
    """
    tables.view(-1).index_copy_(0, indices, block_ids)


@kernel("device")
def record_step(
    device: torch.device, arena: Arena, run: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, RecordedStep | None]:
    """Runs a step and records it, if the device's kernels support recording.

    Tensors that kernels return within `run` may be uninitialized: a recorded step computes after
    `run` has returned.

    Args:
        device: of the step.
        arena: of the recorded step.
        run: computes the step from tensors that keep their addresses, and that the caller keeps
            alive as long as the step. It is called again if the step cannot be recorded.

    Returns:
        The result; and the step, which can run again, or None if it was not recorded.
    """
    return run(), None


@kernel("device")
def mark_step(device: torch.device, number: int) -> None:
    """Marks a place in the step that is being recorded; does nothing if none is.

    Args:
        device: of the step.
        number: passed to `on_mark` of `RecordedStep.run` when the place is reached.
    """


@kernel("current.slot_mapping.device")
def point_to(recorded: AttentionMetadata, current: AttentionMetadata) -> None:
    """Makes steps recorded with `recorded` read the tensors of `current`.

    Both have the same number of tokens.
    """
    raise NotImplementedError("the reference records no steps")
