"""Decode steps and recorded steps, in plain torch."""

from collections.abc import Callable

import torch

from kernels.dispatch import kernel
from kernels.paged_kv import AttentionMetadata
from kernels.recorded_step import Arena, RecordedStep
from kernels.row_state import DecodeInputs, RowState

__all__ = [
    "keep_drawn",
    "lay_out_decode",
    "mark_step",
    "point_to",
    "record_step",
    "write_table_entries",
]


@kernel("rows.positions.device")
def lay_out_decode(
    rows: RowState, row_ids: torch.Tensor, block_size: int, inputs: DecodeInputs
) -> None:
    """Writes the inputs of a decode step, in which each row runs the token that it drew last.

    Args:
        rows: the state after the previous step. The tables hold the blocks of the next tokens.
        row_ids: `[n]` int64.
        block_size: tokens per KV block.
        inputs: for `n` sequences; all fields but `query_starts` are written.
    """
    positions = rows.positions.index_select(0, row_ids)
    blocks, offsets = positions // block_size, positions % block_size
    inputs.token_ids.copy_(rows.last_tokens.index_select(0, row_ids))
    inputs.positions.copy_(positions)
    inputs.draw_positions.copy_(positions + 1)
    inputs.context_lens.copy_(positions + 1)
    tables = rows.tables.index_select(1, row_ids)  # [num_layer_groups, n, max_blocks]
    inputs.tables.copy_(tables)
    own_blocks = tables.gather(2, blocks.expand(len(tables), -1).unsqueeze(-1)).squeeze(-1)
    inputs.slots.copy_(own_blocks.long() * block_size + offsets)


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
