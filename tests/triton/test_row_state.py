"""The rows' state on the device, by Triton and the reference: read for a step, and advanced."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.triton import row_state
from tests.support.devices import DEVICE
from tests.support.row_cases import RowCase

pytestmark = pytest.mark.usefixtures("poisoned_memory")

by_both = pytest.mark.parametrize("module", [row_state, reference], ids=["triton", "reference"])


def _ids(row_ids):
    return torch.tensor(row_ids, dtype=torch.int64, device=DEVICE)


def _check_layout(module, case, sequences, spare=0):
    before, num_tokens = case.state(), sum(len(tokens) for _, _, tokens, _ in sequences)
    inputs = case.new_inputs(len(sequences), num_tokens, spare)
    module.lay_out_sequences(case.rows, case.sent(sequences), case.block_size, inputs)
    case.check_laid_out(sequences, inputs)
    assert case.state() == before
    return inputs


def _decoding(row):
    return row, None, (None,), 0


@st.composite
def _sequences(draw, case):
    """Draws rows that decode, chunks, and empty sequences."""
    sequences, max_len = [], case.rows.tables.shape[2] * case.block_size
    for row in draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]:
        if draw(st.booleans()):
            sequences.append(_decoding(row))
            continue
        start = draw(st.integers(0, max_len - 1))
        count = draw(st.integers(0, max_len - start))
        tokens = tuple(draw(st.integers(0, 10**6)) for _ in range(min(count, 3)))
        sequences.append((row, start, tokens + (7,) * (count - len(tokens)), count // 2))
    return sequences


@by_both
@settings(max_examples=15, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 3, 8, 16]), seed=st.integers(0, 2**20))
def test_inputs_are_laid_out_for_any_sequences(module, data, block_size, seed):
    case = RowCase.make(DEVICE, block_size=block_size, seed=seed)
    sequences = data.draw(_sequences(case))
    _check_layout(module, case, sequences, spare=data.draw(st.integers(0, 3)))


@by_both
def test_padding_refers_to_the_spare_row_many_times(module):
    case = RowCase.make(DEVICE)
    padding = [(5, 0, (0, 0, 0), 0), (5, 0, (0,), 0), (5, 0, (), 0)]
    inputs = _check_layout(module, case, [_decoding(2), _decoding(0), *padding])
    assert inputs.positions[2:].tolist() == [0, 1, 2, 0]
    assert inputs.context_lens.tolist()[2:] == [3, 1, 0]


@by_both
def test_tables_and_tokens_may_need_several_programs(module):
    columns = 2 * row_state._COLUMNS + 5
    case = RowCase.make(DEVICE, num_layer_groups=1, num_rows=4, max_blocks=columns, block_size=2)
    long = 3, 5, tuple(range(7 * row_state._TOKENS + 1)), 0
    _check_layout(module, case, [_decoding(0), long, _decoding(1), _decoding(2)])


@by_both
def test_a_step_of_no_rows_changes_nothing(module):
    case = RowCase.make(DEVICE)
    before = case.state()
    module.lay_out_sequences(case.rows, case.sent([]), case.block_size, case.new_inputs(0, 0))
    module.keep_drawn(case.rows, _ids([]), _ids([]))
    assert case.state() == before


@by_both
def test_rows_advance_by_the_token_drawn(module):
    case = RowCase.make(DEVICE)
    before = case.state()
    module.keep_drawn(case.rows, _ids([4, 0, 3]), _ids([17, -1, 0]))
    after = case.state()
    assert after["tables"] == before["tables"]
    moved = {4: 17, 0: 0, 3: 0}  # an invalid token is kept as 0
    for row in range(6):
        assert after["positions"][row] == before["positions"][row] + (row in moved)
        assert after["last_tokens"][row] == moved.get(row, before["last_tokens"][row])


@by_both
def test_more_rows_than_one_program_advances(module):
    case = RowCase.make(DEVICE, num_rows=200)
    before = case.state()
    row_ids = list(range(198, -1, -1))
    module.keep_drawn(case.rows, _ids(row_ids), _ids(row_ids))
    after = case.state()
    assert (
        after["positions"]
        == [position + 1 for position in before["positions"][:199]] + (before["positions"][199:])
    )
    assert after["last_tokens"][:199] == list(range(199))


def test_table_entries_are_written_at_their_indices():
    case = RowCase.make(DEVICE)
    expected = case.rows.tables.clone()
    entries = [(0, 0, 0, 5), (1, 5, 8, 2**31 - 1), (1, 2, 3, 7)]
    for layer_group, row, column, block_id in entries:
        expected[layer_group, row, column] = block_id
    indices = [(layer_group * 6 + row) * 9 + column for layer_group, row, column, _ in entries]
    block_ids = torch.tensor([entry[-1] for entry in entries], dtype=torch.int32, device=DEVICE)
    reference.write_table_entries(case.rows.tables, _ids(indices), block_ids)
    assert torch.equal(case.rows.tables, expected)
