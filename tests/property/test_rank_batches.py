"""Batches on their way to other ranks arrive as they were sent, without parameters of draws."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import ConfigurationError
from engine.batch import ScheduledBatch, ScheduledChunk, TableUpdate
from engine.runtime.rank_batches import (
    BatchReceiver,
    BatchSender,
    check_same_engine,
    check_same_pools,
)
from tests.support.draw_params import draw_params
from tests.support.fake_model import fake_config, fake_info

SMALL = st.integers(0, 2**31 - 1)
NUMBERS = st.lists(SMALL, max_size=5).map(tuple)
PAIRS = st.lists(st.tuples(SMALL, SMALL), max_size=3).map(tuple)
DRAW = draw_params(temperature=0.7, top_k=3, top_p=0.5, seed=2**64 - 1)
CHUNKS = st.builds(
    ScheduledChunk,
    row=SMALL,
    token_ids=st.lists(SMALL, min_size=1, max_size=5).map(tuple),
    start_position=SMALL,
    draws=st.integers(0, 3).map(lambda count: (DRAW,) * count),
    num_top=st.integers(0, 4),
    prompt_targets=NUMBERS,
    wants_logprobs=st.booleans(),
)
UPDATES = st.builds(
    TableUpdate, row=SMALL, layer_group=st.integers(0, 3), first_index=SMALL, block_ids=NUMBERS
)
BATCHES = st.builds(
    ScheduledBatch,
    step=SMALL,
    chunks=st.lists(CHUNKS, max_size=3).map(tuple),
    decode_rows=NUMBERS,
    table_updates=st.lists(UPDATES, max_size=3).map(tuple),
    swap_ins=PAIRS,
    swap_outs=PAIRS,
    block_copies=PAIRS,
)


class Link:
    """Gives back what was sent."""

    rank = 0

    def send(self, data: bytes) -> None:
        self._data = data

    def receive(self, *, waits_forever: bool) -> bytes:
        assert waits_forever
        return self._data


@given(st.lists(st.tuples(BATCHES, st.booleans()), min_size=1, max_size=4))
def test_what_arrives_is_what_was_sent(batches: list[tuple[ScheduledBatch, bool]]) -> None:
    link = Link()
    sender, receiver = BatchSender(link), BatchReceiver(link)
    sender.num_work_messages = lambda: 7
    rows_before = received_before = ()
    for drawn, keeps_rows in batches:
        batch = replace(drawn, decode_rows=rows_before) if keeps_rows else drawn
        sender.send(batch)
        received, number = receiver.receive()
        assert number == 7
        assert len(received.chunks) == len(batch.chunks)
        for own, sent in zip(received.chunks, batch.chunks, strict=True):
            assert len(own.draws) == len(sent.draws)
            assert own == replace(sent, draws=own.draws, wants_logprobs=False)
        assert replace(received, chunks=()) == replace(batch, chunks=())
        if keeps_rows:
            assert received.decode_rows is received_before
        rows_before, received_before = batch.decode_rows, received.decode_rows


def test_a_rank_with_another_pool_than_rank_0_is_refused() -> None:
    link: Any = Link()
    check_same_pools(link, 64, 0, 3)
    link.rank = 1
    check_same_pools(link, 64, 0, 3)
    with pytest.raises(ConfigurationError, match="number of KV blocks of rank 1 is 63, of rank 0"):
        check_same_pools(link, 63, 0, 3)
    with pytest.raises(ConfigurationError, match="slots for states of rank 1 is 4, of rank 0 3"):
        check_same_pools(link, 64, 0, 4)


def test_a_rank_that_cuts_slots_in_another_way_than_rank_0_is_refused() -> None:
    link: Any = Link()
    info = fake_info(block_size=4, max_model_len=64, has_states=True)
    check_same_engine(link, fake_config(), info)
    link.rank = 1
    check_same_engine(link, fake_config(), info)
    assert info.states is not None
    cut = replace(info, states=info.states.sliced(1, 2, 16))
    with pytest.raises(ConfigurationError, match="layout of states of rank 1 is"):
        check_same_engine(link, fake_config(), cut)
