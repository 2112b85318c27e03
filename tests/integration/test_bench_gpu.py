"""`baton bench gpu --smoke`: each part at a tiny size on the CPU, and the command."""

import argparse
import json
from dataclasses import replace

import pytest

import kernels
from baton.common.errors import ConfigurationError
from benchmarks.gpu import command
from benchmarks.gpu import run as run_module
from benchmarks.gpu.parts import kernels as kernels_part
from benchmarks.gpu.parts import model as model_part
from benchmarks.gpu.parts import rates, tiers, transformers
from benchmarks.gpu.plan import SMOKE, Part
from benchmarks.gpu.record import Record, TimeLeft, read_record
from benchmarks.model_cost import Ceilings
from engine.runtime.model_runner import ModelRunner

_CEILINGS = Ceilings(1e10, 1e11)


@pytest.fixture
def record(tmp_path):
    (tmp_path / "record").touch()
    return Record(tmp_path / "record", TimeLeft.of(100.0))


def results_of(record):
    results = read_record(record._path)
    for result in results:
        assert "failed" not in result, result
        assert "skipped" not in result, result
    return results


def arguments(*flags):
    parser = argparse.ArgumentParser()
    command.add_args(parser)
    return parser.parse_args(flags)


def test_rates_become_ceilings(record):
    rates.measure(SMOKE, None, record)
    ceilings = rates.ceilings_of(results_of(record))
    assert ceilings.read_bytes_per_s > 1e6
    assert ceilings.operations_per_s > 1e6


def test_every_kernel_is_checked_and_timed(record):
    kernels_part.measure(SMOKE, _CEILINGS, record)
    results = results_of(record)
    names = {result["name"].partition(",")[0] for result in results}
    assert names == {
        "decode attention", "prefill attention", "rotate and write KV", "gather blocks",
        "scatter blocks", "sample", "rms norm", "silu and mul", "gated layer",
    }  # fmt: skip
    assert all(result["share_of_ceiling"] > 0 for result in results)


@pytest.mark.parametrize("name", ["paged_attention", "rms_norm", "rotate_and_write_kv"])
def test_a_wrong_kernel_gets_no_figure(record, monkeypatch, name):
    right = getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda *a, **k: right(*a, **k) * 1.01)
    kernels_part.measure(SMOKE, _CEILINGS, record)
    wrong = [result for result in read_record(record._path) if "failed" in result]
    assert wrong
    for result in wrong:
        assert result["failed"].startswith("the result differs from the reference")
        assert "median_us" not in result


def test_a_model_is_measured_and_compared_with_its_floors(record):
    model_part.measure(SMOKE, _CEILINGS, record, "tiny")
    results = results_of(record)
    kinds = [result["kind"] for result in results]
    assert kinds.count("decode step") == len(SMOKE.batch_sizes) * len(SMOKE.contexts)
    assert kinds.count("engine step") == len(SMOKE.batch_sizes)
    assert kinds.count("prefill") == len(SMOKE.prompts)
    assert kinds.count("served") == 1
    for result in results:
        if result["kind"] in ("decode step", "engine step"):
            ratio = result["median_us"] / result["floor_us"]
            assert result["times_floor"] == pytest.approx(ratio, rel=1e-3)
    busy_us = {r["name"]: r["median_us"] for r in results if r["kind"] == "device busy"}
    assert len(busy_us) == kinds.count("decode step")
    for result in results:
        if result["kind"] == "engine step":
            idle_share = 1 - busy_us[result["name"]] / result["median_us"]
            assert result["idle_share"] == pytest.approx(idle_share, rel=1e-3, abs=1e-3)


def test_the_device_is_measured_with_the_same_contexts_as_the_engine(record, monkeypatch):
    calls = []  # for each measurement, the positions of the rows at its decode steps
    launch = ModelRunner._launch

    def launch_noted(runner, batch):
        if calls and batch.decode_rows and not batch.chunks:
            calls[-1].append(runner._steps._rows.positions[list(batch.decode_rows)].tolist())
        return launch(runner, batch)

    def noted(measure):
        def measure_noted(*args, **kwargs):
            calls.append([])
            return measure(*args, **kwargs)

        return measure_noted

    monkeypatch.setattr(ModelRunner, "_launch", launch_noted)
    for name in ("_busy", "_run"):
        monkeypatch.setattr(model_part._Figures, name, noted(getattr(model_part._Figures, name)))
    plan = replace(SMOKE, batch_sizes=(3,), contexts=(20,), prompts=())
    model_part.measure(plan, _CEILINGS, record, "tiny")
    results_of(record)
    busy, _, engine, *_ = calls  # between them, the engine warms up
    assert len(busy) == plan.num_steps - 1
    assert busy == engine


def test_a_device_that_is_busier_than_the_engines_step_is_reported(record, monkeypatch):
    monkeypatch.setattr(model_part, "time_busy", lambda *calls: [100.0])
    model_part.measure(SMOKE, _CEILINGS, record, "tiny")
    shares = [r["idle_share"] for r in results_of(record) if r["kind"] == "engine step"]
    assert len(shares) == len(SMOKE.batch_sizes)
    assert max(shares) < 0


def test_a_failed_measurement_of_the_device_loses_no_other_figure(record, monkeypatch):
    def fall_behind(*calls):
        raise RuntimeError("the host fell behind")

    monkeypatch.setattr(model_part, "time_busy", fall_behind)
    model_part.measure(SMOKE, _CEILINGS, record, "tiny")
    results = read_record(record._path)
    assert {r["kind"] for r in results if "failed" in r} == {"device busy"}
    assert not any("idle_share" in r for r in results)


@pytest.mark.slow
def test_two_tiers_and_one_engine_serve_the_same_requests(record):
    tiers.measure(SMOKE, _CEILINGS, record, "tiny")
    undivided, split = results_of(record)
    assert "undivided" in undivided["name"]
    assert "two tiers" in split["name"]
    for result in (undivided, split):
        assert result["first_token_ms"] <= result["second_token_ms"]
        assert result["output_tokens_per_s"] > 0


@pytest.mark.slow
def test_transformers_serves_the_same_requests(record):
    transformers.measure(SMOKE, None, record, "tiny")
    (result,) = results_of(record)
    assert result["output_tokens_per_s"] > 0


@pytest.mark.slow
def test_the_command_writes_the_results_of_its_parts(tmp_path, capsys):
    path = tmp_path / "figures.json"
    flags = ["--smoke", "--part", "rates", "--part", "kernels", "--json", str(path)]
    assert command.main(arguments(*flags)) == 0
    content = json.loads(path.read_text())
    assert content["is_smoke"]
    assert content["finished"]
    assert [part["part"] for part in content["parts"]] == ["rates", "kernels"]
    shares = [r["share_of_ceiling"] for r in content["results"] if r["kind"] == "kernel"]
    assert shares
    assert all(share > 0 for share in shares)
    assert "nothing failed" in capsys.readouterr().out


@pytest.mark.slow
def test_a_part_that_dies_or_is_late_is_reported():
    dies = Part("dies", "benchmarks.gpu.no_such_module", 1)
    (report,) = run_module.run_parts([dies], is_smoke=True, deadline_s=60.0)
    assert "No module named 'benchmarks.gpu.no_such_module'" in report["problem"]
    late = Part("late", "benchmarks.gpu.parts.rates", 1)  # ended before its interpreter has started
    (report,) = run_module.run_parts([late], is_smoke=True, deadline_s=0.01)
    assert report["problem"] == "ended: its 0 s were over"
    assert report["results"] == []


def test_an_interrupted_run_writes_the_results_so_far(tmp_path, monkeypatch):
    result = {"kind": "rate", "name": "copy", "median_us": 1.0}

    def interrupted(parts, **settings):
        yield {"part": parts[0].name, "seconds": 1.0, "problem": None, "results": [result]}
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_parts", interrupted)
    path = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments("--smoke", "--json", str(path)))
    content = json.loads(path.read_text())
    assert not content["finished"]
    assert content["parts"] == [{"part": "rates", "seconds": 1.0, "problem": None}]
    assert content["results"] == [result]
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_problem", lambda: "no CUDA device")
    assert command.main(arguments()) == 2
    assert capsys.readouterr().out == "bench gpu: no CUDA device; nothing was measured\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--part", "lunch"], "--part is 'lunch'; it must be one of rates, kernels"),
        (["--deadline", "0"], "--deadline is 0.0; it must be > 0"),
        (["--json", "/no/such/file"], "--json is /no/such/file; there is no folder /no/such"),
    ],
)
def test_bad_flags_are_refused(flags, message):
    with pytest.raises(ConfigurationError, match=message):
        command.main(arguments("--smoke", *flags))
