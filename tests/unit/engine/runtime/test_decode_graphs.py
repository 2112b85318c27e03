"""Sizes of CUDA graphs, and their capture and replay."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.steps.device_decode import DecodeGraphs, capture_sizes, padded_size
from tests.support.traced_graphs import TracedStep


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
def test_capture_sizes(max_rows, sizes):
    assert capture_sizes(max_rows) == sizes


@given(st.integers(1, 2000), st.data())
def test_every_number_of_rows_is_padded_to_the_next_size(max_rows, data):
    sizes = capture_sizes(max_rows)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == min(max_rows, 512)
    num_rows = data.draw(st.integers(1, max_rows))
    size = padded_size(sizes, num_rows)
    if num_rows > 512:
        assert size is None
    else:
        assert num_rows <= size < num_rows + 8
        assert not any(num_rows <= other < size for other in sizes)


def test_a_step_is_not_padded_without_capture_sizes():
    assert padded_size((), 1) is None


def test_the_largest_graph_is_captured_first_and_replays_do_not_run_the_model():
    calls, recorded = [], []

    def run(size):
        calls.append(size)
        return torch.tensor(size)

    def record(launch):
        recorded.append(int(launch()))
        return TracedStep(launch)

    graphs = DecodeGraphs((1, 2, 4), run, record)
    graphs.capture()
    assert recorded == [4, 2, 1]
    assert calls[0] == 4
    calls.clear()
    assert int(graphs.run(2)) == 2
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
