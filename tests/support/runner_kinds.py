"""The ways in which a `ModelRunner` computes its steps, all of them on the CPU."""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.runtime.launch import launcher
from engine.runtime.model_runner import ModelRunner
from engine.runtime.steps.host_steps import HostSteps
from engine.runtime.steps.stage_steps import StageSteps
from engine.runtime.steps.steps import Steps
from kernels import dispatch
from tests.support.traced_graphs import (
    EagerDeviceStageSteps,
    EagerDeviceSteps,
    RerunDeviceStageSteps,
    RerunDeviceSteps,
    TracedDeviceStageSteps,
    TracedDeviceSteps,
    attend_without_reads,
)

__all__ = ["KINDS", "RunnerKind", "current_kind", "make_runner", "use_kind"]

_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RunnerKind:
    """A way to compute steps.

    Attributes:
        steps: the class that computes those of the only or the last stage.
        stage_steps: the class that computes those of other stages.
        kernels: "torch" kernels, which read nothing on the host where graphs have none, or
            "triton" kernels; None for the CPU's default kernels.
    """

    steps: type[Steps] = HostSteps
    stage_steps: type[Steps] = StageSteps
    kernels: str | None = None

    def enter(self, monkeypatch) -> None:
        """Makes runners of this kind until the test ends."""
        monkeypatch.setattr(launcher, "HostSteps", self.steps)
        monkeypatch.setattr(launcher, "StageSteps", self.stage_steps)
        if self.kernels is not None:
            use_kernels(self.kernels, monkeypatch)


def use_kernels(name: str, monkeypatch) -> None:
    """Makes the CPU use the kernels of "torch" or "triton" until the test ends."""
    implementations = dispatch.TRITON.implementations
    if name == "torch":
        implementations = {"paged_attention": attend_without_reads}
    for kernel_name, kernel in dispatch.KERNELS.items():
        for dtype in _DTYPES:
            implementation = implementations.get(kernel_name, kernel.reference)
            monkeypatch.setitem(kernel, ("cpu", dtype), implementation)


KINDS = {
    "host": RunnerKind(),
    "device, eager": RunnerKind(EagerDeviceSteps, EagerDeviceStageSteps),
    "device, rerun": RunnerKind(RerunDeviceSteps, RerunDeviceStageSteps),
    "device, graphs": RunnerKind(TracedDeviceSteps, TracedDeviceStageSteps, "torch"),
    "triton, eager": RunnerKind(EagerDeviceSteps, EagerDeviceStageSteps, "triton"),
    "triton, graphs": RunnerKind(RerunDeviceSteps, RerunDeviceStageSteps, "triton"),
}

_current = {"kind": "host"}


def use_kind(name: str, monkeypatch) -> None:
    """Makes runners of that kind until the test ends."""
    monkeypatch.setitem(_current, "kind", name)
    KINDS[name].enter(monkeypatch)


def current_kind() -> str:
    """Returns the current kind of runners."""
    return _current["kind"]


def make_runner(config: EngineConfig) -> ModelRunner:
    """Makes a runner of the current kind."""
    return ModelRunner(config, progress=False)
