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


def _check_layout(module, case, row_ids, spare=0):
    before = case.state()
    inputs = case.new_inputs(len(row_ids), spare)
    module.lay_out_decode(case.rows, _ids(row_ids), case.block_size, inputs)
    case.check_laid_out(row_ids, inputs)
    assert case.state() == before
    return inputs


@by_both
@settings(max_examples=15, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 3, 8, 16]), seed=st.integers(0, 2**20))
def test_inputs_are_laid_out_for_any_rows(module, data, block_size, seed):
    case = RowCase.make(DEVICE, block_size=block_size, seed=seed)
    row_ids = data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 6))]
    _check_layout(module, case, row_ids, spare=data.draw(st.integers(0, 3)))


@by_both
def test_padding_refers_to_the_spare_row_many_times(module):
    case = RowCase.make(DEVICE)
    inputs = _check_layout(module, case, [2, 5, 5, 5, 0])
    assert inputs.positions[1:4].tolist() == [0, 0, 0]


@by_both
def test_tables_may_need_several_programs(module):
    columns = 2 * row_state._COLUMNS + 5
    case = RowCase.make(DEVICE, num_layer_groups=1, num_rows=4, max_blocks=columns, block_size=2)
    _check_layout(module, case, [0, 3, 1, 2])


@by_both
def test_a_step_of_no_rows_changes_nothing(module):
    case = RowCase.make(DEVICE)
    before = case.state()
    module.lay_out_decode(case.rows, _ids([]), case.block_size, case.new_inputs(0))
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
