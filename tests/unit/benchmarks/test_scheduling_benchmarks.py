"""`baton bench scheduling`: its benchmark of scheduler steps."""

import pytest

from benchmarks.offline import scheduler_steps
from benchmarks.offline.scheduler_steps import PATTERNS, NullRunner, measure_steps, start_load
from benchmarks.report import format_table
from benchmarks.scheduling_command import make_tables
from engine.batch import StepOutput


class OneTokenShortRunner(NullRunner):
    """Leaves out the last token of every step."""

    def execute(self, batch):
        output = super().execute(batch)
        return StepOutput(step=output.step, chunks=output.chunks, decoded=output.decoded[:-1])


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch):
    monkeypatch.setattr(scheduler_steps, "_MEASURED_STEPS", 32)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_sequence_is_due_every_sixteen_steps(pattern):
    load = start_load(NullRunner(), 16, 48, pattern)
    times = measure_steps(load)
    num_due = [t.num_due for t in times]
    if pattern == "steady":
        assert num_due == [1] * 32
    if pattern == "aligned":
        assert sorted(num_due) == [0] * 30 + [16] * 2
    assert sum(t.num_added for t in times) == pytest.approx(5 if pattern == "churn" else 0, abs=1)


def test_a_step_that_lacks_a_token_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        start_load(OneTokenShortRunner(), 16, 48, "steady")


def test_steps_are_measured_and_printed(monkeypatch):
    monkeypatch.setattr(scheduler_steps, "_NUM_RUNNING", (4,))
    monkeypatch.setattr(scheduler_steps, "_CONTEXTS", (48,))
    result = scheduler_steps.measure_step_time()
    assert [case["pattern"] for case in result["steps"]] == list(PATTERNS)
    assert all(0 < case["schedule_us"] < case["step_us"] for case in result["steps"])
    steps, growth = map(format_table, make_tables(result))
    assert "churn" in steps
    assert "for each block" in growth
