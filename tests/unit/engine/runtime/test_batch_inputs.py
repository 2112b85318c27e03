"""`StepInputs`: inputs of scheduled batches, compared with ones computed token by token."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import ScheduledBatch, ScheduledChunk, TableUpdate
from engine.runtime.draws.rows import Rows
from engine.runtime.forward.batch_inputs import StepInputs
from tests.support.driven_requests import GREEDY

_CPU = torch.device("cpu")
_NUM_ROWS = 8
_MAX_LEN = 96
_MAX_TOKENS = 3 * 40 + 4


def _chunk(row, token_ids, start=0, draws=(), num_top=0):
    return ScheduledChunk(row, tuple(token_ids), start, draws, num_top)


def _filled_inputs(inputs, batch, rows):
    inputs.fill(batch, rows, np.array(batch.decode_rows, np.int64))
    return inputs.tensors()


def _step_inputs(rows, block_size=8):
    return StepInputs(rows, _MAX_TOKENS, block_size, _CPU)


@st.composite
def _chunks(draw, row):
    token_ids = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
    asks = draw(st.sampled_from([{}, {"draws": (GREEDY,)}, {"num_top": 3}]))
    return _chunk(row, token_ids, draw(st.integers(0, 40)), **asks)


@st.composite
def _batches(draw, rows):
    """Draws a batch, and random tables, positions and last tokens for `rows`."""
    order = draw(st.permutations(range(_NUM_ROWS)))
    num_chunks = draw(st.integers(0, 3))
    num_decodes = draw(st.integers(0 if num_chunks else 1, 4))
    noise = np.random.default_rng(draw(st.integers(0, 10**6)))
    rows.positions[:] = noise.integers(0, _MAX_LEN - 1, _NUM_ROWS)
    rows.last_tokens[:] = noise.integers(0, 10**6, _NUM_ROWS)
    rows.tables[:] = noise.integers(0, 1000, rows.tables.shape)
    return ScheduledBatch(
        step=1,
        chunks=tuple(draw(_chunks(row)) for row in order[:num_chunks]),
        decode_rows=tuple(order[num_chunks : num_chunks + num_decodes]),
    )


@given(st.data(), st.sampled_from([1, 8, 16]), st.integers(1, 3))
def test_inputs_equal_ones_computed_token_by_token(data, block_size, num_layer_groups):
    rows = Rows(num_layer_groups, _NUM_ROWS, -(-_MAX_LEN // block_size))
    step_inputs = _step_inputs(rows, block_size)
    for _ in range(2):  # the second step must contain nothing of the first
        batch = data.draw(_batches(rows))
        _check(_filled_inputs(step_inputs, batch, rows), batch, rows, block_size)
        assert step_inputs.num_tokens == batch.num_tokens
        assert step_inputs.num_seqs == len(batch.chunks) + len(batch.decode_rows)


def _check(inputs, batch, rows, block_size):
    sequences = [(chunk.row, chunk.start_position, chunk.token_ids) for chunk in batch.chunks]
    sequences += [
        (row, int(rows.positions[row]), (int(rows.last_tokens[row]),)) for row in batch.decode_rows
    ]
    tokens = [
        (row, token_id, position)
        for row, start, token_ids in sequences
        for position, token_id in enumerate(token_ids, start)
    ]
    assert inputs.token_ids.tolist() == [token_id for _, token_id, _ in tokens]
    assert inputs.positions.tolist() == [position for _, _, position in tokens]
    assert len(inputs.layer_groups) == len(rows.tables)
    for layer_group, meta in enumerate(inputs.layer_groups):
        slots = [
            rows.tables[layer_group, row, position // block_size] * block_size
            + position % block_size
            for row, _, position in tokens
        ]
        assert meta.slot_mapping.tolist() == slots
        _check_sequences(meta, sequences, rows.tables[layer_group], block_size)
        assert meta.block_tables.shape[1] == -(-meta.max_context_len // block_size)
    wanted = [index for index, chunk in enumerate(batch.chunks) if chunk.draws or chunk.num_top]
    wanted += range(len(batch.chunks), len(sequences))
    _check_logit_rows(inputs, wanted, sequences, rows, block_size)


def _check_logit_rows(inputs, wanted, sequences, rows, block_size):
    """Checks that each token whose logits are wanted is a sequence of its own."""
    if len(wanted) == len(inputs.token_ids):
        assert inputs.logit_rows is None
        return
    ends = inputs.layer_groups[0].query_starts.tolist()[1:]
    token_rows = inputs.logit_rows.rows
    assert token_rows.tolist() == [ends[index] - 1 for index in wanted]
    alone = [
        (row, start + len(token_ids) - 1, token_ids[-1:])
        for row, start, token_ids in (sequences[index] for index in wanted)
    ]
    assert len(inputs.logit_rows.layer_groups) == len(inputs.layer_groups)
    for layer_group, (meta, whole) in enumerate(
        zip(inputs.logit_rows.layer_groups, inputs.layer_groups, strict=True)
    ):
        assert torch.equal(meta.slot_mapping, whole.slot_mapping[token_rows])
        if alone:
            _check_sequences(meta, alone, rows.tables[layer_group], block_size)


def _check_sequences(meta, sequences, tables, block_size):
    ends = meta.query_starts.tolist()
    assert ends[0] == 0
    for index, (row, start, token_ids) in enumerate(sequences):
        context_len = start + len(token_ids)
        num_used = -(-context_len // block_size)
        assert ends[index + 1] - ends[index] == len(token_ids)
        assert meta.context_lens[index] == context_len
        table = meta.block_tables[index].tolist()
        assert table[:num_used] == tables[row, :num_used].tolist()
    assert meta.max_query_len == max(len(token_ids) for _, _, token_ids in sequences)
    assert meta.max_context_len == int(meta.context_lens.max())


def test_table_updates_change_only_the_entries_that_they_name():
    rows = Rows(num_layer_groups=2, num_rows=3, max_blocks=5)
    rows.update_tables([TableUpdate(1, 0, 0, (7, 8, 9)), TableUpdate(1, 1, 2, (4,))])
    rows.update_tables([TableUpdate(1, 0, 1, (5, 6, 3)), TableUpdate(0, 1, 0, ())])
    assert rows.tables[0].tolist() == [[0] * 5, [7, 5, 6, 3, 0], [0] * 5]
    assert rows.tables[1].tolist() == [[0] * 5, [0, 0, 4, 0, 0], [0] * 5]


def test_inputs_have_the_element_types_that_kernels_expect():
    rows = Rows(num_layer_groups=1, num_rows=2, max_blocks=4)
    for batch in (
        ScheduledBatch(1, (_chunk(0, [1, 2]),)),
        ScheduledBatch(1, decode_rows=(1,)),
        ScheduledBatch(1, (_chunk(0, [1, 2], draws=(GREEDY,)),), decode_rows=(1,)),
    ):
        inputs = _filled_inputs(_step_inputs(rows), batch, rows)
        logit_rows = [] if inputs.logit_rows is None else [inputs.logit_rows.rows]
        for tensor in (inputs.token_ids, inputs.positions, *logit_rows):
            assert tensor.dtype is torch.int64
        logit_row_groups = inputs.logit_rows.layer_groups if inputs.logit_rows else ()
        for meta in (*inputs.layer_groups, *logit_row_groups):
            assert meta.slot_mapping.dtype is torch.int64
            for tensor in (meta.block_tables[:1], meta.query_starts, meta.context_lens):
                assert tensor.dtype is torch.int32
                assert tensor.is_contiguous()


def test_all_steps_use_the_same_memory():
    rows = Rows(num_layer_groups=2, num_rows=4, max_blocks=6)
    step_inputs = _step_inputs(rows)
    places = set()
    for batch in (
        ScheduledBatch(1, decode_rows=(1,)),
        ScheduledBatch(1, (_chunk(0, range(40)), _chunk(3, [1], 7, (GREEDY,))), (1,)),
        ScheduledBatch(1, (_chunk(2, [5, 6], 40, (GREEDY,)),)),
    ):
        inputs = _filled_inputs(step_inputs, batch, rows)
        addresses = [inputs.token_ids.data_ptr(), inputs.positions.data_ptr()]
        for meta in inputs.layer_groups:
            tensors = (meta.block_tables, meta.query_starts, meta.context_lens, meta.slot_mapping)
            addresses += [tensor.data_ptr() for tensor in tensors]
            addresses.append(meta.block_tables.stride(0))
        places.add(tuple(addresses))
    assert len(places) == 1
