"""No step returns before the device has finished with its blocks, which are reused afterwards."""

import pytest
import torch

from engine.batch import ScheduledBatch, ScheduledChunk, StepOutput, TableUpdate
from engine.config import EngineConfig
from engine.runtime import model_runner
from tests.support.checkpoints import tiny_checkpoint
from tests.support.draw_params import draw_params
from tests.support.runner_kinds import make_runner, use_kind


class Device:
    """A fake device that counts waits for its recorded events and for all of its work."""

    tensors = ()  # the output of a step that only moves blocks

    def __init__(self) -> None:
        self.num_events = 0
        self.num_waits = 0

    def fetch(self, device: torch.device, tensors: object) -> "Device":
        self.num_events += 1
        return self

    def wait(self) -> None:
        self.num_events -= 1

    def wait_for(self, device: torch.device) -> None:
        self.num_waits += 1


@pytest.fixture
def runner(monkeypatch):
    use_kind("device, eager", monkeypatch)
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")),
        device="cpu",
        block_size=8,
        max_model_len=64,
        num_gpu_blocks_override=16,
        swap_space=2**20,
    )
    return make_runner(config)


@pytest.fixture
def device(runner, monkeypatch) -> Device:
    device = Device()
    monkeypatch.setattr(model_runner, "fetch", device.fetch)
    monkeypatch.setattr(model_runner, "wait_for", device.wait_for)
    return device


def test_a_step_that_only_moves_blocks_waits_for_them(runner, device) -> None:
    pending = runner.submit(ScheduledBatch(1, swap_outs=((4, 0),), block_copies=((1, 2),)))
    assert device.num_events == 1
    assert pending.result() == StepOutput(1)
    assert device.num_events == 0


def test_a_step_that_fails_half_way_leaves_no_work_running(runner, device, monkeypatch) -> None:
    def launch(batch: ScheduledBatch) -> None:
        raise RuntimeError("as the test asked")

    monkeypatch.setattr(runner._steps, "launch", launch)
    chunk = ScheduledChunk(0, (1, 2), 0, (draw_params(0.0, 0, 1.0, 0),))
    batch = ScheduledBatch(1, (chunk,), table_updates=(TableUpdate(0, 0, 0, (3,)),))
    with pytest.raises(RuntimeError, match="as the test asked"):
        runner.submit(batch)
    assert device.num_waits == 1
