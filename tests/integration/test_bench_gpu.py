"""The benchmarks of a GPU, tiny and on the CPU: a runner's steps, and `baton bench gpu --smoke`."""

import json

import pytest

from baton.cli import main
from benchmarks.model_cost import Ceilings
from benchmarks.model_shape import read_shape
from benchmarks.offline import steps as device_steps
from benchmarks.offline.offline_engine import Floors, OfflineEngine
from benchmarks.offline.steps import measure_device_steps
from engine.config import EngineConfig
from engine.loop.core import EngineCore
from engine.runtime.model_runner import ModelRunner
from tests.support.checkpoints import tiny_checkpoint

SIZES = {"batch_sizes": (1, 3), "contexts": (20, 48), "num_steps": 4}


@pytest.fixture(scope="module")
def running():
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")),
        dtype="float32",
        num_threads=1,
        max_model_len=128,
        num_gpu_blocks_override=64,
        async_scheduling=True,
    )
    runner = ModelRunner(config, progress=False)
    with OfflineEngine(config, EngineCore(config, runner)) as engine:
        floors = Floors({}, Ceilings(1e10, 1e11), *read_shape(config))
        yield engine, runner, floors
    runner.close()


def steps_of(running, **sizes):
    return list(measure_device_steps(*running, **(SIZES | sizes)))


def test_steps_are_measured_and_compared_with_their_floors(running):
    steps = steps_of(running)
    assert not [step.failed for step in steps if step.failed]
    kinds = [step.kind for step in steps]
    assert kinds.count("decode") == kinds.count("device busy") == 2 * 2
    assert kinds.count("engine step") == kinds.count("prompt") == 2
    busy_us = {(s.batch_size, s.context): s.median_us for s in steps if s.kind == "device busy"}
    for step in steps:
        assert step.median_us > 0
        assert (step.floor_us is None) == (step.kind == "device busy")
        if step.kind == "engine step":
            idle_share = 1 - busy_us[step.batch_size, step.context] / step.median_us
            assert step.idle_share == pytest.approx(idle_share)


def test_the_device_is_measured_with_the_same_contexts_as_the_engine(running, monkeypatch):
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
    for name in ("busy", "_run"):
        monkeypatch.setattr(device_steps._Steps, name, noted(getattr(device_steps._Steps, name)))
    steps_of(running, batch_sizes=(3,), contexts=(20,))
    busy, _, engine, *_ = calls  # between them, the engine warms up
    assert len(busy) == SIZES["num_steps"] - 1
    assert busy == engine


def test_a_device_that_is_busier_than_the_engines_step_is_reported(running, monkeypatch):
    monkeypatch.setattr(device_steps, "time_busy", lambda *calls: [100.0])
    shares = [step.idle_share for step in steps_of(running) if step.kind == "engine step"]
    assert len(shares) == 2
    assert max(shares) < 0


def test_a_failed_measurement_loses_no_other_figure(running, monkeypatch):
    def fall_behind(*calls):
        raise RuntimeError("the host fell behind")

    monkeypatch.setattr(device_steps, "time_busy", fall_behind)
    steps = steps_of(running, batch_sizes=(1,), contexts=(20,))
    assert {(s.kind, s.failed) for s in steps if s.failed} == {
        ("device busy", "RuntimeError: the host fell behind")
    }
    assert not any(step.idle_share for step in steps)


def test_a_case_without_room_in_the_pool_says_so(running):
    steps = steps_of(running, batch_sizes=(30,), contexts=(48,))
    assert "the pool lacks" in steps[0].failed


@pytest.mark.slow
def test_the_command_writes_the_figures_of_its_parts(tmp_path, capsys):
    path = tmp_path / "figures.json"
    flags = ["--part", "kernels", "--part", "steps", "--json", str(path)]
    assert main(["bench", "gpu", "--smoke", *flags]) == 0
    content = json.loads(path.read_text())
    assert content["is_smoke"]
    assert content["finished"]
    assert [part["part"] for part in content["parts"]] == ["kernels", "steps"]
    kernels, steps = (
        json.loads((tmp_path / part["file"]).read_text()) for part in content["parts"]
    )
    assert all(outcome["kernel_s"] > 0 for outcome in kernels["outcomes"])
    assert all(profile["total_us"] > 0 for profile in steps["profiles"])
    assert "nothing failed" in capsys.readouterr().out
