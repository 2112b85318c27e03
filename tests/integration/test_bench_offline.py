"""`baton bench latency`, `throughput` and others: an engine in this process, on a tiny model."""

import json
from dataclasses import replace
from itertools import product

import pytest

from baton.cli import main
from benchmarks import ceilings
from benchmarks.offline.offline_engine import OfflineEngine, measure_floors
from benchmarks.offline.steps import profile_steps
from benchmarks.request import BenchRequest
from engine.config import EngineConfig
from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.draft_heads import random_heads

ENGINE = ("--num-threads", "1", "--max-model-len", "128", "--num-gpu-blocks-override", "64")


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch):
    monkeypatch.setattr(ceilings, "_SIZES", {"cpu": ceilings._Sizes(1 << 20, 64)})
    monkeypatch.setattr(ceilings, "_MIN_SECONDS", 0.0)


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")),
        dtype="float32",
        num_threads=1,
        max_model_len=128,
        num_gpu_blocks_override=16,
    )
    with OfflineEngine(config) as running:
        yield running


def test_records_have_the_time_of_every_token(engine):
    requests = [BenchRequest(prompt_of(20), 5), BenchRequest(prompt_of(9), 1)]
    ended = []
    long, short = engine.run(requests, ended.append)
    assert (len(long.token_times_s), len(short.token_times_s)) == (5, 1)
    assert long.error is short.error is None
    assert long.sent_s <= long.token_times_s[0] <= long.ended_s
    assert ended == [short, long]
    assert engine.start_up_s > 0


def test_a_turn_waits_for_the_previous_turn(engine):
    first, second = engine.run(
        [BenchRequest(prompt_of(9), 6), BenchRequest(prompt_of(8), 2, after=0)]
    )
    assert second.sent_s >= first.ended_s
    assert len(second.token_times_s) == 2


def test_a_request_that_ends_early_has_an_error(engine):
    (record,) = engine.run([BenchRequest(prompt_of(120), 200)])
    assert record.error == f"{len(record.token_times_s)} tokens came, 200 were asked for"


def test_a_request_that_can_never_fit_has_an_error(engine):
    fits, too_long = engine.run([BenchRequest(prompt_of(9), 2), BenchRequest(prompt_of(129), 2)])
    assert fits.error is None
    assert "INVALID_ARGUMENT" in too_long.error


def test_latency_prints_floors(tmp_path, capsys):
    path = tmp_path / "report.json"
    sizes = ("--batch-size", "1", "2", "--input-len", "8", "--output-len", "4", "--repeats", "1")
    model = ("--model", str(tiny_checkpoint("gpt2")))
    assert main(["bench", "latency", *model, *sizes, *ENGINE, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [case["case"]["batch_size"] for case in report["cases"]] == [1, 2]
    assert all(case["step_ms"] > 0 and case["step_floor_ms"] > 0 for case in report["cases"])
    assert report["peak_memory_bytes"] > 2**20
    assert "floor" in capsys.readouterr().out


def test_floors_do_not_depend_on_the_type_of_the_kv_cache():
    config = EngineConfig(model=str(tiny_checkpoint("llama")), num_threads=1)
    plain = measure_floors(config)
    rounded = measure_floors(replace(config, kv_cache_dtype="fp8_e4m3"))
    assert plain.dtype == rounded.dtype == "float32"
    assert plain.shape == rounded.shape
    assert plain.shape.bytes_per_weight == 4


def test_throughput_runs_any_workload(tmp_path, capsys):
    path = tmp_path / "report.json"
    model = ("--model", str(tiny_checkpoint("llama")))
    turns = ("--workload", "conversation", "--num-requests", "6", "--num-turns", "2")
    lengths = ("--input-len", "10", "--output-len", "4")
    command = ["bench", "throughput", *model, *turns, *lengths, *ENGINE, "--json", str(path)]
    assert main(command) == 0
    report = json.loads(path.read_text())
    assert report["metrics"]["num_output_tokens"] == 24
    assert report["metrics"]["num_failed"] == 0
    assert report["share_of_floor"] > 0
    assert "duration / floor" in capsys.readouterr().out


def test_the_command_fails_if_every_request_fails(capsys):
    flags = ("--num-requests", "2", "--input-len", "200")
    assert main(["bench", "throughput", "--model", str(tiny_checkpoint("llama")), *flags, *ENGINE])
    assert "INVALID_ARGUMENT" in capsys.readouterr().out


def test_engine_step_reports_the_time_of_each_phase(tmp_path, capsys):
    path = tmp_path / "report.json"
    sizes = ("--batch-size", "1", "3", "--input-len", "8", "--num-steps", "6")
    model = ("--model", str(tiny_checkpoint("llama")))
    assert main(["bench", "engine-step", *model, *sizes, *ENGINE, "--json", str(path)]) == 0
    profiles = json.loads(path.read_text())["profiles"]
    kinds = [(profile["kind"], profile["batch_size"]) for profile in profiles]
    assert kinds == [("prefill", 1), ("decode", 1), ("prefill", 3), ("decode", 3)]
    for profile in profiles:
        assert profile["num_steps"] == (1 if profile["kind"] == "prefill" else 5)
        phases = profile["phases_us"]
        assert all(microseconds > 0 for microseconds in phases.values())
        assert 0.5 < sum(phases.values()) / profile["total_us"] < 1.5
    assert "A decode step" in capsys.readouterr().out


def test_speculation_reports_speeds_with_drafts_and_the_cost_of_rows(tmp_path, capsys):
    path = tmp_path / "report.json"
    heads = random_heads("medusa", tiny_checkpoint("llama"), tmp_path / "heads")
    model = ("--model", str(tiny_checkpoint("llama")), "--num-threads", "1")
    sizes = ("--batch-size", "3", "--max-tokens", "6", "--rounds", "1")
    draft_models = ("--draft-model", str(tiny_checkpoint("opt")), f"medusa={heads}")
    drafts = ("--num-speculative-tokens", "3", "--method", "suffix", *draft_models)
    assert main(["bench", "speculation", *model, *sizes, *drafts, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    cases = [(each["workload"], each["method"]) for each in report["workloads"]]
    assert cases == list(product(("repetitive", "ordinary"), ("suffix", "draft_model", "medusa")))
    for each in report["workloads"]:
        assert (each["batch_size"], each["num_requests"], each["num_differing"]) == (3, 8, 0)
        speeds = each["tokens_per_s_with"], each["tokens_per_s_without"]
        assert each["ratio"] == pytest.approx(speeds[0] / speeds[1]) == each["ratios"][0]
        assert 0 <= each["num_accepted"] <= each["num_drafts"]
        assert 1 <= each["tokens_per_step"] <= 4
    assert [row["batch_size"] for row in report["rows"]] == [1, 8]
    for row in report["rows"]:
        assert list(row["known_ms"]) == ["1", "2", "3", "4"]
        assert min(row["decode_ms"], *row["known_ms"].values()) > 0
    shown = capsys.readouterr().out
    assert "plain texts" in shown
    assert shown.count("equal") == 6


def test_speculation_needs_room_for_its_rows(capsys):
    model = ("--model", str(tiny_checkpoint("llama")), *ENGINE)
    pool = ("--num-gpu-blocks-override", "60")
    assert main(["bench", "speculation", *model, *pool]) == 2
    assert "4 blocks too few for 8 rows of 128 tokens" in capsys.readouterr().err


def test_profiling_does_not_change_the_engine(engine):
    profile_steps(engine, [BenchRequest(prompt_of(9), 4)])
    assert engine.core.step_timer.on_step is None
    (record,) = engine.run([BenchRequest(prompt_of(9), 4)])
    assert record.error is None


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("latency", ("--repeats", "0"), "--repeats is 0"),
        ("latency", ("--batch-size", "0"), "--batch-size has 0"),
        ("throughput", ("--block-size", "0"), "--block-size is 0"),
        ("speculation", ("--rounds", "0"), "--rounds is 0"),
    ],
)
def test_bad_flags_are_refused(command, flags, message, capsys):
    assert main(["bench", command, *flags]) == 2
    assert message in capsys.readouterr().err
