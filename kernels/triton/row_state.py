"""Inputs of steps, and the state of their rows, in Triton."""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.row_state import RowState, SentSequences, SequenceInputs

__all__ = ["keep_drawn", "lay_out_sequences"]

_COLUMNS = 1024  # columns of a table that one program copies
_TOKENS = 128  # tokens that one program lays out at a time
_ROWS = 128  # rows that one program advances


@TRITON.implements(reference.lay_out_sequences)
def lay_out_sequences(
    rows: RowState, sent: SentSequences, block_size: int, inputs: SequenceInputs
) -> None:
    """Copies no column past a context's last block."""
    num_seqs = len(sent.row_ids)
    if not num_seqs:
        return
    num_layer_groups, _, max_blocks = rows.tables.shape
    sent_vectors = (sent.row_ids, sent.starts, sent.query_starts, sent.num_unkept, sent.token_ids)
    of_tokens = (inputs.token_ids, inputs.positions, inputs.draw_positions)
    of_sequences = (inputs.query_starts, inputs.context_lens, inputs.num_unkept)
    vectors = (*sent_vectors, *of_tokens, *of_sequences, rows.positions, rows.last_tokens)
    assert all(vector.is_contiguous() for vector in vectors)
    assert rows.tables.stride(2) == inputs.tables.stride(2) == inputs.slots.stride(1) == 1
    _lay_out_kernel[(num_seqs, num_layer_groups, triton.cdiv(max_blocks, _COLUMNS))](
        rows.tables,
        rows.positions,
        rows.last_tokens,
        *sent_vectors,
        *of_tokens,
        *of_sequences,
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
        TOKENS=_TOKENS,
    )


# These lie in one buffer, at addresses and with strides that change from step to step.
@triton.jit(
    do_not_specialize=["tables_group_stride", "slots_group_stride"],
    do_not_specialize_on_alignment=[
        "row_ids",
        "starts",
        "sent_query_starts",
        "sent_unkept",
        "sent_tokens",
    ],
)
def _lay_out_kernel(
    row_tables,
    row_positions,
    last_tokens,
    row_ids,
    starts,
    sent_query_starts,
    sent_unkept,
    sent_tokens,
    token_ids,
    positions,
    draw_positions,
    query_starts,
    context_lens,
    num_unkept,
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
    TOKENS: tl.constexpr,
):
    """`tables[g, i] = row_tables[g, row_ids[i]]` up to the context's last block, and the other
    inputs of sequence i. Program (i, g, c) copies COLUMNS columns from c * COLUMNS on, and lays
    out each c-th tile of TOKENS tokens.
    """
    sequence = tl.program_id(0).to(tl.int64)
    layer_group = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    row = tl.load(row_ids + sequence)
    first = tl.load(sent_query_starts + sequence)
    num_tokens = (tl.load(sent_query_starts + sequence + 1) - first).to(tl.int32)
    start = tl.load(starts + sequence)
    start = tl.where(start < 0, tl.load(row_positions + row), start)
    end = start + num_tokens
    own_table = row_tables + layer_group * row_tables_group_stride + row * row_tables_row_stride
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    mask = (columns * block_size < end) & (columns < max_blocks)
    block_ids = tl.load(own_table + columns, mask=mask, other=0)
    table = tables + layer_group * tables_group_stride + sequence * tables_row_stride
    tl.store(table + columns, block_ids, mask=mask)
    for begin in range(part * TOKENS, num_tokens, tl.num_programs(2) * TOKENS):
        indices = begin + tl.arange(0, TOKENS)
        is_token = indices < num_tokens
        places = first + indices
        own_positions = start + indices
        blocks = tl.load(own_table + own_positions // block_size, mask=is_token, other=0)
        own_slots = blocks.to(tl.int64) * block_size + own_positions % block_size
        tl.store(slots + layer_group * slots_group_stride + places, own_slots, mask=is_token)
        if layer_group == 0:
            known = tl.load(sent_tokens + places, mask=is_token, other=0)
            known = tl.where(known < 0, tl.load(last_tokens + row), known)
            tl.store(token_ids + places, known, mask=is_token)
            tl.store(positions + places, own_positions, mask=is_token)
            tl.store(draw_positions + places, own_positions + 1, mask=is_token)
    if (part == 0) & (layer_group == 0):
        if sequence == 0:
            tl.store(query_starts, 0)
        tl.store(query_starts + sequence + 1, (first + num_tokens).to(tl.int32))
        tl.store(context_lens + sequence, end.to(tl.int32))
        tl.store(num_unkept + sequence, tl.load(sent_unkept + sequence).to(tl.int32))


@TRITON.implements(reference.keep_drawn)
def keep_drawn(rows: RowState, row_ids: torch.Tensor, tokens: torch.Tensor) -> None:
    count = len(row_ids)
    if not count:
        return
    vectors = (rows.positions, rows.last_tokens, row_ids, tokens)
    assert all(vector.is_contiguous() for vector in vectors)
    _keep_drawn_kernel[(triton.cdiv(count, _ROWS),)](*vectors, count, ROWS=_ROWS)


# The number and the place of rows change from step to step, which must not cause another
# compilation.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["row_ids"])
def _keep_drawn_kernel(positions, last_tokens, row_ids, tokens, count, ROWS: tl.constexpr):
    """`last_tokens[r] = max(token, 0)`, `positions[r] += 1`; program i advances ROWS rows."""
    indices = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = indices < count
    rows = tl.load(row_ids + indices, mask=mask, other=0)
    drawn = tl.load(tokens + indices, mask=mask, other=0)
    following = tl.load(positions + rows, mask=mask, other=0) + 1
    tl.store(last_tokens + rows, tl.maximum(drawn, 0), mask=mask)
    tl.store(positions + rows, following, mask=mask)
