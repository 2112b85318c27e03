"""Scheduled batches as tensors, against a token-by-token reading of the contract."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import DrawParams, ScheduledBatch, ScheduledSequence
from engine.runtime.batch_inputs import build_batch_inputs

_CPU = torch.device("cpu")
_DRAW = DrawParams(0.0, 0, 1.0, 0)


@st.composite
def _sequences(draw, block_size):
    start = draw(st.integers(0, 40))
    token_ids = tuple(draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=40)))
    num_blocks = -(-(start + len(token_ids)) // block_size) + draw(st.integers(0, 3))
    table = tuple(draw(st.permutations(range(100, 100 + num_blocks))))
    return ScheduledSequence("r", token_ids, start, table, draw(st.sampled_from([None, _DRAW])))


@given(st.data(), st.sampled_from([1, 8, 16]))
def test_rows_follow_the_contract_token_by_token(data, block_size):
    sequences = tuple(data.draw(st.lists(_sequences(block_size), min_size=1, max_size=5)))
    inputs = build_batch_inputs(ScheduledBatch(1, sequences), block_size, _CPU)
    rows = [
        (token_id, position, sequence.block_table[position // block_size], position % block_size)
        for sequence in sequences
        for position, token_id in enumerate(sequence.token_ids, sequence.start_position)
    ]
    assert inputs.token_ids.tolist() == [row[0] for row in rows]
    assert inputs.positions.tolist() == [row[1] for row in rows]
    slots = [block_id * block_size + offset for _, _, block_id, offset in rows]
    assert inputs.meta.slot_mapping.tolist() == slots
    _check_sequences(inputs, sequences, block_size)


def _check_sequences(inputs, sequences, block_size):
    meta = inputs.meta
    ends = meta.query_starts.tolist()
    assert ends[0] == 0
    for index, sequence in enumerate(sequences):
        context_len = sequence.start_position + sequence.num_tokens
        num_used = -(-context_len // block_size)
        assert ends[index + 1] - ends[index] == sequence.num_tokens
        assert meta.context_lens[index] == context_len
        table = meta.block_tables[index].tolist()
        assert tuple(table[:num_used]) == sequence.block_table[:num_used]
    assert meta.max_query_len == max(sequence.num_tokens for sequence in sequences)
    assert meta.max_context_len == int(meta.context_lens.max())
    drawing = [index for index, sequence in enumerate(sequences) if sequence.draw is not None]
    assert inputs.draw_rows.tolist() == [ends[index + 1] - 1 for index in drawing]
    assert inputs.draw_positions == tuple(int(meta.context_lens[index]) for index in drawing)
    assert len(inputs.draws) == len(drawing)


def test_tables_are_as_wide_as_the_longest_context_and_padded_with_zero():
    sequences = (
        ScheduledSequence("short", (1, 2), 0, (9,), None),
        ScheduledSequence("long", (3,), 20, (7, 5, 6, 8), _DRAW),
    )
    meta = build_batch_inputs(ScheduledBatch(1, sequences), 8, _CPU).meta
    assert meta.block_tables.tolist() == [[9, 0, 0], [7, 5, 6]]


def test_element_types_are_those_the_kernels_take():
    batch = ScheduledBatch(1, (ScheduledSequence("r", (1,), 0, (0,), None),))
    inputs = build_batch_inputs(batch, 8, _CPU)
    meta = inputs.meta
    for tensor in (inputs.token_ids, inputs.positions, meta.slot_mapping, inputs.draw_rows):
        assert tensor.dtype is torch.int64
    for tensor in (meta.block_tables, meta.query_starts, meta.context_lens):
        assert tensor.dtype is torch.int32
