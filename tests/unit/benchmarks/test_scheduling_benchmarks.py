"""`baton bench scheduling`: its benchmarks of KV memory and of scheduler steps."""

import pytest

from benchmarks.scheduling import block_ops, kv_waste, sharing, step_time
from benchmarks.scheduling.command import print_report
from benchmarks.scheduling.served_load import NullRunner
from benchmarks.scheduling.step_time import PATTERNS, measure_steps, start_load
from engine.batch import StepOutput


class OneTokenShortRunner(NullRunner):
    """Leaves out the last token of every step."""

    def execute(self, batch):
        output = super().execute(batch)
        return StepOutput(step=output.step, chunks=output.chunks, decoded=output.decoded[:-1])


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch):
    monkeypatch.setattr(kv_waste, "_NUM_REQUESTS", 40)
    monkeypatch.setattr(kv_waste, "_MAX_NUM_SEQS", 8)
    monkeypatch.setattr(sharing, "_NUM_REQUESTS", {"Alpaca": 12, "ShareGPT": 6})
    monkeypatch.setattr(sharing, "_NUM_CONCURRENT", 3)
    monkeypatch.setattr(sharing, "_WIDTHS", (2, 4))
    monkeypatch.setattr(sharing, "_PEAKS", (0.6,))
    monkeypatch.setattr(sharing, "_NUM_REPORTS", 64)
    monkeypatch.setattr(step_time, "_MEASURED_STEPS", 32)
    monkeypatch.setattr(block_ops, "_NUM_TABLES", 4)
    monkeypatch.setattr(block_ops, "_ROUNDS", 1)


def test_larger_blocks_waste_more_memory_and_all_waste_little():
    results = kv_waste.measure_kv_waste()
    wastes = [result["waste_of_known"] for result in results]
    assert wastes == sorted(wastes)
    assert 0 < wastes[0] < wastes[-1] < 0.05
    assert all(r["waste_of_computed"] >= r["waste_of_known"] for r in results)


def test_sharing_grows_with_width_and_is_larger_for_beams():
    saved = {(r["method"], r["lengths"], r["width"]): r["saved"] for r in sharing.measure_sharing()}
    for (method, lengths, width), share in saved.items():
        assert 0 < share < 1 - 1 / width
        if width == 4:
            assert share > saved[method, lengths, 2]
        if method == "beam":
            assert share > saved["parallel", lengths, width]


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


def test_block_operations_are_measured_and_printed(capsys):
    results = block_ops.measure_block_ops()
    assert all(result["ns"] > 0 for result in results)
    print_report({"machine": {"cpu": "some"}, "block_ops": results})
    assert all(result["operation"] in capsys.readouterr().out for result in results[:1])
