"""`FakeRunner`: the scheduler's tests rely on it to detect invalid batches."""

import math
from dataclasses import replace

import pytest

from engine.batch import INVALID_TOKEN, ScheduledBatch, ScheduledChunk, TableUpdate
from tests.support.draw_params import draw_params
from tests.support.fake_runner import (
    GREEDY,
    FakeRunner,
    expected_tokens,
    fake_info,
    log_probabilities,
    next_token,
    top_tokens,
)

VOCAB = 5
PROMPT = (0, 1, 2, 3, 4, 1)
TABLES = (TableUpdate(0, 0, 0, (1, 2, 3, 4)), TableUpdate(0, 1, 0, (5, 6, 7, 8)))
START = ScheduledBatch(1, (ScheduledChunk(0, PROMPT, 0, (GREEDY,)),), table_updates=TABLES)


def _runner(**options):
    info = fake_info(4, 16, vocab_size=VOCAB, windows=(None, 3))
    return FakeRunner(info, 32, num_host_blocks=8, **options)


@pytest.mark.parametrize("submits", ["now", "late", "thread"])
def test_batches_run_in_the_order_of_submission(submits):
    runner, rows = _runner(submits=submits), (0,)
    futures = [runner.submit(START)]
    futures += [runner.submit(ScheduledBatch(step, decode_rows=rows)) for step in range(2, 6)]
    last = futures[-1].result(timeout=30)
    first, *others = [future.result(timeout=30) for future in futures]
    assert last is others[-1]
    drawn = [*first.chunks[0].token_ids, *(output.decoded[0] for output in others)]
    assert drawn == expected_tokens(PROMPT, 5, vocab_size=VOCAB)
    runner.close()


def test_a_late_batch_runs_when_its_result_is_read():
    runner = _runner(submits="late")
    futures = [runner.submit(START), runner.submit(ScheduledBatch(2))]
    assert not runner.batches
    assert futures[1].exception() is None
    assert runner.batches == [START, ScheduledBatch(2)]


def test_candidates_tops_and_log_probabilities_are_those_of_the_model():
    runner = _runner()
    draws = tuple(draw_params(1.0, 0, 1.0, seed) for seed in range(9))
    chunks = (
        ScheduledChunk(0, PROMPT, 0, draws, wants_logprobs=True),
        ScheduledChunk(1, PROMPT[:1], 0, num_top=3),
    )
    others = (TableUpdate(1, 0, 0, (9,)), TableUpdate(1, 1, 0, (10,)))
    batch = ScheduledBatch(1, chunks, table_updates=TABLES + others)
    candidates, top = runner.execute(batch).chunks
    assert candidates.token_ids == tuple(next_token(PROMPT, draw, VOCAB) for draw in draws)
    assert len(set(candidates.token_ids)) > 1
    every = log_probabilities(PROMPT, VOCAB)
    assert candidates.logprobs == tuple(every[token] for token in candidates.token_ids)
    assert math.isclose(sum(math.exp(value) for value in every), 1)
    assert list(zip(top.token_ids, top.logprobs, strict=True)) == top_tokens(PROMPT[:1], 3, VOCAB)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (ScheduledBatch(2, decode_rows=(1,)), "drawn nothing"),
        (ScheduledBatch(2, decode_rows=(0, 0)), "scheduled twice"),
        (ScheduledBatch(2, (ScheduledChunk(0, (), 6),)), "empty"),
        (ScheduledBatch(2, (ScheduledChunk(0, (1,), 8),)), "unwritten"),
        (ScheduledBatch(2, table_updates=(TableUpdate(0, 0, 4, (1,)),)), "longer than the model"),
        (ScheduledBatch(2, table_updates=(TableUpdate(0, 0, 3, (32,)),)), "no such block"),
        (ScheduledBatch(2, swap_ins=((0, 1),)), "holds nothing"),
        (ScheduledBatch(2, block_copies=((1, 9), (2, 9))), "target of two"),
        (ScheduledBatch(2, decode_rows=(0,), block_copies=((2, 1),)), "foreign or stale"),
        (ScheduledBatch(2, decode_rows=(0,), block_copies=((2, 6),)), "foreign or stale"),
    ],
)
def test_invalid_batches_raise_an_error(batch, message):
    runner = _runner()
    runner.execute(START)
    with pytest.raises(AssertionError, match=message):
        runner.execute(batch)
    assert len(runner.failures) == 1


def test_two_rows_must_not_write_one_slot():
    runner = _runner()
    runner.execute(START)
    twin = tuple(replace(update, row=1) for update in TABLES)
    chunk = ScheduledChunk(1, (0,), 6, (GREEDY,))
    with pytest.raises(AssertionError, match="one slot"):
        runner.execute(ScheduledBatch(2, (chunk,), (0,), twin))


def test_blocks_behind_a_window_are_not_read():
    runner = _runner()
    runner.execute(START)
    decode = ScheduledBatch(2, decode_rows=(0,), block_copies=((20, 5),))  # block 5: positions 0-3
    assert runner.execute(decode).decoded == (expected_tokens(PROMPT, 2, vocab_size=VOCAB)[1],)
    assert not runner.failures


def test_swapped_blocks_can_return_to_other_blocks():
    runner = _runner()
    first = runner.execute(START).chunks[0].token_ids[0]
    runner.execute(ScheduledBatch(2, swap_outs=((1, 0), (2, 1), (5, 2), (6, 3))))
    updates = (TableUpdate(3, 0, 0, (11, 12)), TableUpdate(3, 1, 0, (13, 14)))
    swap_ins = ((0, 11), (1, 12), (2, 13), (3, 14))
    chunk = ScheduledChunk(3, (first,), len(PROMPT), (GREEDY,))
    output = runner.execute(ScheduledBatch(3, (chunk,), table_updates=updates, swap_ins=swap_ins))
    assert output.chunks[0].token_ids == (expected_tokens(PROMPT, 2, vocab_size=VOCAB)[1],)


def test_steps_after_a_failed_one_draw_invalid_tokens_and_do_not_count_as_failures():
    runner, rows = _runner(), (0,)
    runner.submit(START)
    runner.fault = "raise"
    assert runner.submit(ScheduledBatch(2, decode_rows=rows)).exception() is not None
    chunk = ScheduledChunk(1, PROMPT, 0)
    others = (TableUpdate(1, 0, 0, (9, 10)), TableUpdate(1, 1, 0, (11, 12)))
    batch = ScheduledBatch(3, (chunk,), rows, others)
    assert runner.submit(batch).result().decoded == (INVALID_TOKEN,)
    assert not runner.failures
    runner.fault = "not finite"
    assert runner.submit(START).result().chunks[0].token_ids == (INVALID_TOKEN,)
    assert runner.submit(ScheduledBatch(5, decode_rows=(0,))).result().decoded == (INVALID_TOKEN,)
    assert not runner.failures


def test_another_row_must_not_read_the_kv_of_a_failed_row():
    runner = _runner()
    runner.fault = "not finite"
    runner.submit(START)
    runner.submit(ScheduledBatch(2, decode_rows=(0,)))
    twin = tuple(replace(update, row=1) for update in TABLES)
    chunk = ScheduledChunk(1, (0,), len(PROMPT) + 1)
    future = runner.submit(ScheduledBatch(3, (chunk,), table_updates=twin))
    assert "foreign or stale" in str(future.exception())
