"""The memory that a trial step on a GPU is measured with."""

import gc
import weakref

import pytest
import torch

from engine.runtime.launch.trial_steps import TrialSteps
from tests.support.fake_model import fake_config, fake_info


class Steps:
    """Steps that refer to themselves, as those with graphs do."""

    def __init__(self) -> None:
        self.itself = self


class Trials(TrialSteps):
    """Trial steps that run nothing, and note which steps were alive meanwhile."""

    def __init__(self, earlier: "weakref.ref[Steps]") -> None:
        info = fake_info(4, 64)
        super().__init__(
            fake_config(),
            lambda pool, states: Steps(),
            info.layout,
            None,
            info,
            torch.device("cuda"),
            num_spare_blocks=0,
        )
        self._earlier = earlier
        self.alive: list[Steps | None] = []

    def run(self, num_tokens: int, max_seqs: int, *, uses_all_memory: bool = False) -> int:
        self.alive.append(self._earlier())
        return num_tokens

    def _measure_graphs(self) -> int:
        return 0


@pytest.fixture
def without_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_steps_that_compiled_kernels_take_no_memory_beside_the_largest_step(monkeypatch) -> None:
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    for name in ("max_memory_reserved", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    trials = Trials(weakref.ref(Steps()))
    trials.profile(0)
    assert trials.alive == [None]
