"""Parts of `baton bench gpu` that need no GPU: plans, floors, statistics, time, records, tables."""

import itertools
import json

import pytest

from benchmarks.cli import _COMMANDS
from benchmarks.gpu import hardware, timing
from benchmarks.gpu import record as record_module
from benchmarks.gpu.hardware import slug
from benchmarks.gpu.models import engine_config, kv_bytes_per_token, shape_of, write_config
from benchmarks.gpu.parts.rates import ceilings_of
from benchmarks.gpu.plan import FULL, MODELS, SMOKE, parts_of, time_for
from benchmarks.gpu.record import Record, TimeLeft, read_record, summary
from benchmarks.gpu.tables import failures_of, make_tables, skipped_of, with_ratios
from benchmarks.kernels.cost import Cost
from benchmarks.model_cost import Ceilings, ModelShape, decode_floor_s
from benchmarks.report.report import format_table

_CEILINGS = Ceilings(read_bytes_per_s=1e12, operations_per_s=1e14)


def make_record(path, seconds=60.0):
    path.touch()
    return Record(path, TimeLeft.of(seconds))


# Sizes


@pytest.mark.parametrize(
    ("name", "num_weights", "kv_bytes"),
    [("llama-3.1-8b", 8.03e9, 131_072), ("qwen3-0.6b", 0.596e9, 114_688)],
)
def test_models_have_the_size_in_their_name(name, num_weights, kv_bytes):
    shape = shape_of(name, "bfloat16")
    tables = 1 if MODELS[name]["tie_word_embeddings"] else 2
    total = shape.num_body_weights + tables * shape.num_head_weights
    assert total == pytest.approx(num_weights, rel=0.002)
    assert kv_bytes_per_token(name, "bfloat16") == kv_bytes


@pytest.mark.parametrize("plan", [FULL, SMOKE])
def test_the_engine_config_has_room_for_every_case_of_the_plan(plan, tmp_path):
    (folder,) = {write_config(name, plan.dtype, tmp_path) for name in plan.models[:1]}
    config = engine_config(plan, folder)
    assert config.max_model_len > max(plan.contexts) + 2 * plan.num_steps + 8
    assert config.max_num_seqs == max(plan.batch_sizes)
    assert all(count * length <= config.max_num_batched_tokens for count, length in plan.prompts)
    for name in plan.models:
        assert MODELS[name]["max_position_embeddings"] >= config.max_model_len
    assert json.loads((folder / "config.json").read_text())["dtype"] == plan.dtype


def test_the_floor_of_a_decode_step_counts_weights_and_kv():
    shape = ModelShape(900, 10, 100, 0)  # 1000 weights of two bytes
    floor_s = decode_floor_s(shape, _CEILINGS, batch_size=3, context=50, kv_bytes_per_token=20)
    assert floor_s == pytest.approx((2000 + 3 * 50 * 20) / 1e12)


def test_the_floor_of_a_large_step_is_its_operations():
    shape = ModelShape(10**9, 10, 10**8, 1000)
    floor_s = decode_floor_s(shape, _CEILINGS, batch_size=1000, context=10, kv_bytes_per_token=1)
    operations = 1000 * (2 * 1.1e9 + 4 * 1000 * 10)
    assert floor_s == pytest.approx(operations / 1e14)


def test_a_slug_makes_a_file_name_of_a_device_name():
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"


def test_all_missing_packages_are_named_in_one_line(monkeypatch):
    absent = {"triton", "xxhash", "pytest"}
    monkeypatch.setattr(hardware, "find_spec", lambda name: None if name in absent else name)
    assert hardware.find_problem() == (
        "not installed: triton, xxhash; on a GPU machine: pip install 'baton-llm[gpu]'"
    )
    assert hardware.find_problem("gpu,test", ["pytest"]) == (
        "not installed: triton, xxhash, pytest; on a GPU machine: pip install 'baton-llm[gpu,test]'"
    )


# Statistics


def test_a_summary_has_the_median_the_rates_and_the_share_of_the_ceiling():
    figures = summary([3e-6, 1e-6, 2e-6], Cost(10**6, 10**6), _CEILINGS)
    assert figures["median_us"] == 2.0
    assert figures["samples_us"] == [3.0, 1.0, 2.0]
    assert figures["gb_per_s"] == 500.0
    assert figures["tflop_per_s"] == 0.5
    assert figures["share_of_ceiling"] == 0.5
    assert figures["limit"] == "bytes"


def test_a_summary_keeps_a_subset_of_the_samples_and_their_total_number():
    figures = summary([1e-6] * 201)
    assert figures["num_samples"] == 201
    assert 30 <= len(figures["samples_us"]) <= 40
    assert "gb_per_s" not in figures


def test_ceilings_come_from_the_measured_rates():
    results = [
        {"name": "copy", "median_us": 1.0, "gb_per_s": 4300.0},
        {"name": "matrix product", "median_us": 1.0, "tflop_per_s": 780.0},
    ]
    assert ceilings_of(results) == Ceilings(4.3e12, 7.8e14)
    assert ceilings_of([results[0], {"name": "matrix product", "failed": "no"}]) is None


# Time


def test_parts_share_the_time_left_by_weight():
    parts = parts_of(FULL)
    assert parts[0].name == "rates"
    spent = 0.0
    for index, part in enumerate(parts):
        mine = time_for(parts, index, 450.0 - spent)
        assert mine == pytest.approx(450.0 * part.weight / sum(part.weight for part in parts))
        spent += mine
    assert spent == pytest.approx(450.0)
    assert time_for(parts, len(parts) - 1, 12.5) == 12.5


def test_the_time_left_stops_at_zero(monkeypatch):
    clock = itertools.count(100.0)
    monkeypatch.setattr(record_module.time, "monotonic", lambda: next(clock))
    left = TimeLeft.of(2.5)
    assert [left.seconds for _ in range(4)] == [1.5, 0.5, 0.0, 0.0]


class Mark:
    """An event that a device reaches when the test says so."""

    def __init__(self, reached):
        self._reached = reached

    def query(self):
        return self in self._reached


def test_launch_ahead_marks_the_start_and_end_of_each_call():
    launched = []
    marks = timing._launch_ahead(lambda: launched.append(1), 3, lambda: Mark([]))
    assert len(launched) == 3
    assert len(set(marks)) == 4


def test_a_device_that_catches_up_with_the_host_raises_an_error():
    """The device reaches the third call while the host still launches it."""
    marks, reached, launched = [], [], []

    def mark():
        marks.append(Mark(reached))
        return marks[-1]

    def launch():
        launched.append(1)
        if len(launched) == 3:
            reached.extend(marks)

    with pytest.raises(RuntimeError, match="the device came to call 3 of 5 before all of it was"):
        timing._launch_ahead(launch, 5, mark)


# Records


def test_a_failure_is_recorded_and_later_measurements_run(tmp_path):
    record = make_record(tmp_path / "record")

    def fail():
        raise ValueError("no such kernel")

    assert not record.attempt("kernel", "bad", fail)
    assert record.attempt("kernel", "good", lambda: {"median_us": 1.0})
    assert not record.attempt("kernel", "absent", lambda: {"skipped": "no room"})
    bad, good, absent = read_record(tmp_path / "record")
    assert bad["failed"] == "ValueError: no such kernel"
    assert "in fail" in bad["traceback"]
    assert good["median_us"] == 1.0
    assert absent["skipped"] == "no room"


def test_nothing_begins_when_no_time_is_left(tmp_path):
    record = make_record(tmp_path / "record", seconds=0.0)
    assert not record.attempt("kernel", "late", pytest.fail)
    assert read_record(tmp_path / "record")[0]["failed"] == "no time was left"


def test_a_record_that_was_cut_off_keeps_its_whole_lines(tmp_path):
    path = tmp_path / "record"
    make_record(path).add("rate", "copy", median_us=1.0)
    path.write_text(path.read_text() + '{"kind": "ra')
    assert read_record(path) == [{"kind": "rate", "name": "copy", "median_us": 1.0}]


# Tables


def test_tables_show_each_figure_next_to_its_floor():
    results = [
        {"kind": "decode step", "name": "m, 1 x 8", "median_us": 120.0, "floor_us": 100.0,
         "times_floor": 1.2},
        {"kind": "decode step", "name": "m, 2 x 8", "failed": "RuntimeError: lost"},
        {"kind": "start", "name": "m", "seconds": 3.0},
    ]  # fmt: skip
    (table,) = make_tables(results)
    text = format_table(table)
    rows = {line.rpartition("m, ")[2].split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["1 x 8"][4:] == ["120.0", "100.0", "1.200"]
    assert rows["2 x 8"][4:] == ["failed"]


def test_serving_rates_are_compared_with_transformers_for_the_same_model():
    results = [
        {"kind": "served", "name": "m", "output_tokens_per_s": 300.0},
        {"kind": "served", "name": "n", "output_tokens_per_s": 300.0},
        {"kind": "served by transformers", "name": "m", "output_tokens_per_s": 100.0},
        {"kind": "served by transformers", "name": "n", "failed": "no"},
    ]
    own, other, *_ = with_ratios(results)
    assert own["times_transformers"] == 3.0
    assert "times_transformers" not in other


def test_failures_are_reported_with_their_parts():
    reports = [
        {"part": "rates", "problem": None, "results": [{"kind": "rate", "name": "copy"}]},
        {"part": "kernels", "problem": "ended with status -9: \nkilled", "results": [
            {"kind": "kernel", "name": "rms norm", "failed": "not what the reference gives"},
            {"kind": "decode step", "name": "m, 256 x 8192", "skipped": "the pool lacks 9 blocks"},
        ]},
    ]  # fmt: skip
    assert failures_of(reports) == [
        "kernels: killed",
        "kernel, rms norm: not what the reference gives",
    ]
    assert skipped_of(reports) == ["decode step, m, 256 x 8192: the pool lacks 9 blocks"]


def test_the_benchmark_is_a_subcommand():
    assert _COMMANDS["gpu"].module == "benchmarks.gpu.command"
