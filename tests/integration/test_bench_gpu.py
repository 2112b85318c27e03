"""The steps of a runner as a GPU's are measured, tiny and on the CPU."""

import pytest

from benchmarks.kernels.case import DecoderShape
from benchmarks.model_cost import Ceilings
from benchmarks.model_shape import read_shape
from benchmarks.offline import device_steps
from benchmarks.offline.device_steps import measure_device_steps
from benchmarks.offline.kernel_times import profile_device_steps
from benchmarks.offline.offline_engine import Floors, OfflineEngine
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
    assert kinds.count("mixed") == 2
    assert kinds.count("engine step") == kinds.count("prompt") == 2
    busy_us = {(s.batch_size, s.context): s.median_us for s in steps if s.kind == "device busy"}
    for step in steps:
        assert step.median_us > 0
        assert (step.floor_us is None) == (step.kind in ("device busy", "mixed"))
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


def test_mixed_steps_compute_a_chunk_beside_the_other_rows(running, monkeypatch):
    batches, launch = [], ModelRunner._launch

    def launch_noted(runner, batch):
        batches.append(batch)
        return launch(runner, batch)

    monkeypatch.setattr(ModelRunner, "_launch", launch_noted)
    steps = steps_of(running, batch_sizes=(3,), contexts=(20,))
    assert [step.failed for step in steps if step.kind == "mixed"] == [None]
    mixed = [batch for batch in batches if batch.chunks and len(batch.decode_rows) == 2]
    assert len(mixed) > SIZES["num_steps"]
    assert {(chunk.row, len(chunk.token_ids)) for batch in mixed for chunk in batch.chunks} == {
        (2, 20)
    }


def test_operations_have_floors_of_their_own(running):
    engine, runner, floors = running
    decoder = DecoderShape(
        width=64,
        num_gated=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=300,
        has_tied_head=False,
    )
    steps = list(measure_device_steps(engine, runner, floors, decoder=decoder, **SIZES))
    for step in steps:
        has_floor = step.kind in ("decode", "mixed", "prompt")
        assert (step.operations_floor_us is not None) == has_floor


def test_the_kernels_of_each_kind_of_step_are_listed(running):
    _, runner, _ = running
    profiles = list(
        profile_device_steps(runner, batch_sizes=(1, 3), context=20, num_chunk_tokens=8)
    )
    kinds = [(profile.kind, profile.batch_size) for profile in profiles]
    assert kinds == [("decode", 1), ("decode", 3), ("mixed", 3), ("prompt", 1)]
    for profile in profiles:
        assert profile.failed is None
        times_us = [kernel.us for kernel in profile.kernels]
        assert times_us == sorted(times_us, reverse=True)
        assert times_us[0] > 0


def test_a_profile_without_room_says_so(running):
    _, runner, _ = running
    profile, *_ = profile_device_steps(runner, batch_sizes=(30,), context=48, num_chunk_tokens=8)
    assert profile.failed == "RuntimeError: the pool has no room"
