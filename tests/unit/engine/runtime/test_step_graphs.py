"""Shapes of CUDA graphs, the words of steps that are padded to them, and capture and replay."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import ScheduledBatch, ScheduledChunk
from engine.runtime.draws.rows import Rows
from engine.runtime.steps.device_forward import StepGraphs
from engine.runtime.steps.sent_steps import SentStep
from engine.runtime.steps.step_shapes import (
    StepShape,
    captured_shapes,
    decode_sizes,
    smallest_fitting,
)
from kernels import SentSequences
from tests.support.draw_params import GREEDY
from tests.support.traced_graphs import TracedStep

_MAX_LEN = 600
_LIMITS = {"max_rows": 24, "max_tokens": 700, "max_model_len": _MAX_LEN}


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (4, (1, 2, 4)),
        (8, (1, 2, 4, 8)),
        (13, (1, 2, 4, 8, 13)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
    ],
)
def test_numbers_of_rows_that_decode(max_rows, sizes):
    assert decode_sizes(max_rows) == sizes


def _shapes(max_drafts=0, **limits):
    return captured_shapes(**(_LIMITS | limits), max_drafts=max_drafts, is_last=True)


@given(st.integers(1, 2000), st.data())
def test_every_number_of_rows_is_padded_to_the_next_size(max_rows, data):
    shapes = _shapes(max_rows=max_rows, max_tokens=max(700, max_rows))
    num_rows = data.draw(st.integers(1, max_rows))
    shape = smallest_fitting(shapes, StepShape(num_rows, num_rows, num_rows, 1, 9))
    if num_rows > 512:
        assert shape is None
    else:
        assert num_rows <= shape.num_tokens < num_rows + 8
        assert shape.num_seqs == shape.num_logit_rows == shape.num_tokens


def test_a_step_is_not_padded_without_shapes():
    assert smallest_fitting((), StepShape(1, 1, 1, 1, 1)) is None


@pytest.mark.parametrize(("max_drafts", "max_rows"), [(0, 24), (4, 24), (4, 256)])
def test_captured_shapes_are_all_different(max_drafts, max_rows):
    shapes = _shapes(max_drafts, max_rows=max_rows, max_tokens=2048)
    assert len(set(shapes)) == len(shapes)
    assert all(shape.num_logit_rows <= max_rows * (1 + max_drafts) for shape in shapes)


@st.composite
def _batches(draw, max_drafts):
    """Draws chunks with and without logits and draft tokens, and rows that decode."""
    order = draw(st.permutations(range(_LIMITS["max_rows"])))
    num_chunks = draw(st.integers(0, 6))
    chunks = []
    for row in order[:num_chunks]:
        num_drafts = draw(st.integers(0, max_drafts))
        num_known = draw(st.sampled_from([1, 1, 2, 40]))
        is_drawing = num_drafts > 0 or draw(st.booleans())
        chunk = ScheduledChunk(
            row,
            tuple(range(1, 1 + num_known + num_drafts)),
            draw(st.integers(0, _MAX_LEN - num_known - num_drafts)),
            draws=(GREEDY,) if is_drawing else (),
            num_drafts=num_drafts,
        )
        chunks.append(chunk)
    num_decodes = draw(st.integers(0 if chunks else 1, 24 - num_chunks))
    decode_rows = tuple(order[num_chunks : num_chunks + num_decodes])
    return ScheduledBatch(1, tuple(chunks), decode_rows)


@given(st.sampled_from([0, 3]), st.data())
def test_padded_steps_have_the_sequences_of_the_step_and_padding_in_the_spare_row(max_drafts, data):
    batch = data.draw(_batches(max_drafts))
    sent = SentStep(batch, np.array(batch.decode_rows, np.int64), _MAX_LEN)
    shape = smallest_fitting(_shapes(max_drafts), sent.shape)
    assert shape is not None
    whole, token_rows, alone = _split(sent.words(shape, spare_row=99), shape)
    expected = [(c.row, c.start_position, list(c.token_ids)) for c in batch.chunks]
    expected += [(row, -1, [-1]) for row in batch.decode_rows]
    sequences = _sequences(whole)
    assert sequences[: len(expected)] == expected
    padding = sequences[len(expected) :]
    assert all((row, start) == (99, 0) for row, start, _ in padding)
    assert max(len(tokens) for _, _, tokens in sequences) <= shape.max_query_len
    assert whole.num_unkept.tolist()[: len(batch.chunks)] == [c.num_drafts for c in batch.chunks]
    if shape.has_logit_rows:
        _check_logit_rows(batch, whole, token_rows, alone)
    else:
        assert all(chunk.needs_logits for chunk in batch.chunks)


@given(st.data())
def test_a_planned_step_has_whole_contexts_with_their_draft_tokens(data):
    batch = data.draw(_batches(max_drafts=3))
    chunks, decode_rows = batch.chunks, batch.decode_rows
    rows = Rows(1, _LIMITS["max_rows"], 1)
    rows.positions[:] = 100 + np.arange(len(rows.positions))
    rows.tables[0, :, 0] = np.arange(len(rows.positions))
    on_host = SentStep(batch, np.array(decode_rows, np.int64), _MAX_LEN).on_host(rows)
    ends = [chunk.start_position + len(chunk.token_ids) for chunk in chunks]
    assert on_host.context_lens.tolist() == ends + [101 + row for row in decode_rows]
    lens = [len(chunk.token_ids) for chunk in chunks] + [1] * len(decode_rows)
    assert np.diff(on_host.query_starts).tolist() == lens
    assert on_host.tables[0, :, 0].tolist() == [chunk.row for chunk in chunks] + [*decode_rows]


def _split(words, shape):
    words, sizes = torch.from_numpy(words), (shape.num_seqs, shape.num_tokens)
    end = SentSequences.num_words(*sizes)
    whole = SentSequences.of_words(words[:end], *sizes)
    if not shape.has_logit_rows:
        assert len(words) == end
        return whole, None, None
    count = shape.num_logit_rows
    return (
        whole,
        words[end : end + count].tolist(),
        SentSequences.of_words(words[end + count :], count, count),
    )


def _sequences(sent):
    starts = sent.query_starts.tolist()
    return [
        (row, first, sent.token_ids[start:end].tolist())
        for row, first, start, end in zip(
            sent.row_ids.tolist(), sent.starts.tolist(), starts[:-1], starts[1:], strict=True
        )
    ]


def _check_logit_rows(batch, whole, token_rows, alone):
    """Checks that each token whose logits are wanted is a sequence of its own, in order."""
    ends, wanted = whole.query_starts.tolist()[1:], []
    for index, chunk in enumerate(batch.chunks):
        for after in range(chunk.num_drafts, -1, -1) if chunk.needs_logits else ():
            position = chunk.start_position + chunk.num_tokens - 1 - after
            wanted.append((ends[index] - 1 - after, chunk.row, position))
    for index, row in enumerate(batch.decode_rows, len(batch.chunks)):
        wanted.append((ends[index] - 1, row, -1))
    sequences = zip(token_rows, alone.row_ids.tolist(), alone.starts.tolist(), strict=True)
    assert list(sequences)[: len(wanted)] == wanted
    assert alone.query_starts.tolist() == list(range(len(token_rows) + 1))


def test_the_largest_graph_is_first_and_replays_do_not_run_the_model():
    calls, recorded = [], []
    shapes = [StepShape(size, size, size, 1, 9) for size in (1, 2, 4)]
    shapes.append(replace(shapes[-1], max_query_len=4, has_logit_rows=True, num_seqs=5))

    def run(shape):
        calls.append(shape)
        return torch.tensor(shape.num_seqs)

    def record(launch):
        recorded.append(int(launch()))
        return TracedStep(launch)

    graphs = StepGraphs(shapes, run, record)
    assert graphs.fitting(shapes[1]) is None
    for shape in graphs.largest_first():
        graphs.capture_one(shape)
    assert recorded == [5, 4, 2, 1]
    calls.clear()
    assert graphs.fitting(shapes[1]) == shapes[1]
    assert int(graphs.run(shapes[1])) == 2
    assert calls == []


class TestTracedStep:
    """`TracedStep`, the stand-in for CUDA graphs in tests, has their limitations."""

    def test_a_run_reads_the_present_contents_of_its_inputs(self):
        values, sums = torch.arange(4.0), torch.zeros(())

        def run():
            sums.add_(values.sum())
            return values * 2

        step = TracedStep(run)
        values.fill_(5.0)
        assert step.run().tolist() == [10.0] * 4
        assert float(sums) == 6 + 20

    def test_a_run_keeps_the_recorded_scalars(self):
        factor = [2.0]
        values = torch.ones(3)
        step = TracedStep(lambda: values * factor[0])
        factor[0] = 7.0
        assert step.run().tolist() == [2.0] * 3

    def test_recording_refuses_to_wait_for_the_device(self):
        with pytest.raises(AssertionError, match="waits"):
            TracedStep(lambda: torch.ones(int(torch.tensor(3))))

    def test_a_run_does_not_see_reassigned_tensors(self):
        inputs = {"values": torch.ones(2)}
        step = TracedStep(lambda: inputs["values"] + 1)
        inputs["values"] = torch.zeros(2)
        assert step.run().tolist() == [2.0, 2.0]
