"""Inputs and state of decode steps, in Triton."""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.row_state import DecodeInputs, RowState

__all__ = ["keep_drawn", "lay_out_decode"]

_COLUMNS = 1024  # columns of a table that one program copies
_ROWS = 128  # rows that one program advances


@TRITON.implements(reference.lay_out_decode)
def lay_out_decode(
    rows: RowState, row_ids: torch.Tensor, block_size: int, inputs: DecodeInputs
) -> None:
    """Copies no column past a context's last block."""
    if not len(row_ids):
        return
    num_layer_groups, _, max_blocks = rows.tables.shape
    vectors = (inputs.token_ids, inputs.positions, inputs.draw_positions, inputs.context_lens)
    assert all(vector.is_contiguous() for vector in (*vectors, row_ids, rows.positions))
    assert rows.last_tokens.is_contiguous()
    assert rows.tables.stride(2) == inputs.tables.stride(2) == inputs.slots.stride(1) == 1
    _lay_out_kernel[(len(row_ids), num_layer_groups, triton.cdiv(max_blocks, _COLUMNS))](
        rows.tables,
        rows.positions,
        rows.last_tokens,
        row_ids,
        *vectors,
        inputs.tables,
        inputs.slots,
        rows.tables.stride(0),
        rows.tables.stride(1),
        inputs.tables.stride(0),
        inputs.tables.stride(1),
        inputs.slots.stride(0),
        max_blocks,
        block_size,
        COLUMNS=_COLUMNS,
    )


@triton.jit
def _lay_out_kernel(
    row_tables,
    row_positions,
    last_tokens,
    row_ids,
    token_ids,
    positions,
    draw_positions,
    context_lens,
    tables,
    slots,
    row_tables_group_stride,
    row_tables_row_stride,
    tables_group_stride,
    tables_row_stride,
    slots_group_stride,
    max_blocks,
    block_size,
    COLUMNS: tl.constexpr,
):
    """`tables[g, i] = row_tables[g, row_ids[i]]` up to the context's last block, and the
    other inputs of sequence i; program (i, g, c) copies COLUMNS columns from c * COLUMNS on.
    """
    sequence = tl.program_id(0).to(tl.int64)
    layer_group = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(2)
    row = tl.load(row_ids + sequence)
    position = tl.load(row_positions + row)
    block = position // block_size
    own_table = row_tables + layer_group * row_tables_group_stride + row * row_tables_row_stride
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    mask = (columns <= block) & (columns < max_blocks)
    block_ids = tl.load(own_table + columns, mask=mask, other=0)
    table = tables + layer_group * tables_group_stride + sequence * tables_row_stride
    tl.store(table + columns, block_ids, mask=mask)
    if chunk == 0:
        slot = tl.load(own_table + block).to(tl.int64) * block_size + position % block_size
        tl.store(slots + layer_group * slots_group_stride + sequence, slot)
        if layer_group == 0:
            tl.store(token_ids + sequence, tl.load(last_tokens + row))
            tl.store(positions + sequence, position)
            tl.store(draw_positions + sequence, position + 1)
            tl.store(context_lens + sequence, (position + 1).to(tl.int32))


@TRITON.implements(reference.keep_drawn)
def keep_drawn(rows: RowState, row_ids: torch.Tensor, tokens: torch.Tensor) -> None:
    count = len(row_ids)
    if not count:
        return
    vectors = (rows.positions, rows.last_tokens, row_ids, tokens)
    assert all(vector.is_contiguous() for vector in vectors)
    _keep_drawn_kernel[(triton.cdiv(count, _ROWS),)](*vectors, count, ROWS=_ROWS)


# The number of rows changes from step to step, which must not cause another compilation.
@triton.jit(do_not_specialize=["count"])
def _keep_drawn_kernel(positions, last_tokens, row_ids, tokens, count, ROWS: tl.constexpr):
    """`last_tokens[r] = max(token, 0)`, `positions[r] += 1`; program i advances ROWS rows."""
    indices = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = indices < count
    rows = tl.load(row_ids + indices, mask=mask, other=0)
    drawn = tl.load(tokens + indices, mask=mask, other=0)
    following = tl.load(positions + rows, mask=mask, other=0) + 1
    tl.store(last_tokens + rows, tl.maximum(drawn, 0), mask=mask)
    tl.store(positions + rows, following, mask=mask)
