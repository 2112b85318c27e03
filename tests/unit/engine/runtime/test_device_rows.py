"""`DeviceRows`: block tables, positions, last tokens and draw parameters on the device."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import ScheduledChunk, TableUpdate
from engine.runtime.draws.device_rows import DeviceRows
from engine.runtime.draws.sampler import draw_record, draw_table
from kernels import DRAW_RECORD
from tests.support.draw_params import draw_params

_CPU = torch.device("cpu")
_GROUPS, _ROWS, _BLOCKS = 2, 5, 6
_SPARE_BLOCK = 77


def _rows():
    return DeviceRows(_GROUPS, _ROWS, _BLOCKS, _SPARE_BLOCK, _CPU)


@st.composite
def _updates(draw):
    first = draw(st.integers(0, _BLOCKS - 1))
    block_ids = draw(st.lists(st.integers(0, 999), max_size=_BLOCKS - first))
    row, layer_group = draw(st.integers(0, _ROWS - 1)), draw(st.integers(0, _GROUPS - 1))
    return TableUpdate(row, layer_group, first, tuple(block_ids))


def _send(rows, chunks=(), decode_rows=()):
    """Advances rows past a step, and sends the device what it needs of it."""
    rows.host.advance(chunks, np.array(decode_rows, np.int64))
    rows.store_chunks(torch.from_numpy(rows.chunk_words(chunks)))
    rows.store_tables(torch.from_numpy(rows.table_words()))


@given(st.lists(st.lists(_updates(), max_size=8), max_size=6), st.lists(st.booleans(), min_size=6))
def test_device_tables_equal_host_tables_after_any_updates(steps, is_sent):
    """If several updates change an entry, the last one counts, as on the host. Updates of steps
    that sent nothing, as they failed or only swapped, are sent with the next one.
    """
    rows = _rows()
    for updates, sends in zip(steps, is_sent, strict=False):
        rows.update_tables(updates)
        if sends:
            _send(rows)
            assert not rows.has_unsent_tables
            assert rows.state.tables[:, :_ROWS].tolist() == rows.host.tables.tolist()
        assert (rows.state.tables[:, rows.spare_row] == _SPARE_BLOCK).all()


def test_chunks_set_device_positions_and_decoding_rows_do_not():
    rows = _rows()
    _send(rows, (ScheduledChunk(3, (5, 6, 7), 10), ScheduledChunk(0, (1,), 4)), [2])
    assert rows.state.positions.tolist() == [5, 0, 0, 13, 0, 0]
    assert rows.host.positions.tolist() == [5, 0, 1, 13, 0]


def test_draw_parameters_are_stored_by_row():
    draws = (draw_params(0.5, 7, 0.9, 2**64 - 3, min_p=0.5), draw_params(1.5, 0, 1.0, 11))
    chunks = (ScheduledChunk(4, (1, 2), 0, draws[:1]), ScheduledChunk(1, (3,), 0, draws[1:]))
    rows = _rows()
    _send(rows, chunks)
    state = rows.state
    assert state.draws.temperature.tolist() == [0, 1.5, 0, 0, 0.5, 0]
    assert state.draws.top_k.tolist() == [0, 0, 0, 0, 7, 0]
    assert state.draws.top_p.tolist()[4] == 0.9
    assert state.draws.log_min_p.tolist()[4] == math.log(0.5)
    assert state.draws.seed.tolist()[4] == -3  # the bits of 2**64 - 3


def test_drawn_tokens_are_stored_by_row():
    rows = _rows()
    rows.keep_drawn(torch.tensor([4, 1]), torch.tensor([-1, 31]))
    assert rows.state.last_tokens.tolist() == [0, 31, 0, 0, 0, 0]  # not the invalid -1


def test_a_draw_table_equals_its_records_bit_for_bit():
    draws = [draw_params(0.25, 3, 0.5, 2**63, min_p=1.0), draw_params(0.0, 0, 1.0, 1)]
    table = draw_table(np.array([draw_record(draw) for draw in draws], DRAW_RECORD), _CPU)
    assert table.temperature.tolist() == [0.25, 0.0]
    assert table.top_k.tolist() == [3, 0]
    assert table.top_p.tolist() == [0.5, 1.0]
    assert table.log_min_p.tolist() == [0.0, -math.inf]
    assert table.seed.tolist() == [-(2**63), 1]
