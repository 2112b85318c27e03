"""Drafts are computed on the drafter's GPU, whichever one the thread that reads tokens has."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.batch import ChunkOutput, DraftWork, ScheduledChunk
from engine.runtime.drafting import drafter as drafter_module
from engine.runtime.drafting.drafter import Drafter, ProposalJob


@dataclass
class _Drafter(Drafter):
    """Notes the current device of each draft."""

    drafted_on: list
    read_device: object

    def __post_init__(self):
        self._device, self._num_served = torch.device("cuda", 1), 100

    def allocate(self, num_blocks):
        """Needs no memory."""

    def time_work(self):
        return 0.0, 0.0

    def _draft(self, drawing, states):
        self.drafted_on.append(self.read_device())
        return [(7,)] * len(drawing)

    def _forget(self):
        raise AssertionError("drafting has failed")


def test_drafts_are_computed_on_the_drafters_device(monkeypatch):
    devices = [torch.device("cuda", 0)]

    @contextmanager
    def current(device):
        devices.append(device)
        yield
        devices.pop()

    monkeypatch.setattr(drafter_module, "current", current)
    drafter = _Drafter([], lambda: devices[-1])
    job = ProposalJob(0, ScheduledChunk(0, (1,), 0, ()), DraftWork.__new__(DraftWork), None, 0)
    (output,) = drafter.propose([job], [ChunkOutput((5,), (0.0,))], None)
    assert output.proposals == (7,)
    assert drafter.drafted_on == [torch.device("cuda", 1)]
    assert devices == [torch.device("cuda", 0)]
