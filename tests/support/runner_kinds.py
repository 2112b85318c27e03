"""The ways in which a `ModelRunner` computes its steps, all of them on the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType, ModuleType

import torch

import kernels
from engine.config import EngineConfig
from engine.runtime.device_steps import DeviceSteps
from engine.runtime.model_runner import ModelRunner
from engine.runtime.steps import Steps
from tests.support.traced_graphs import RerunDeviceSteps, TracedDeviceSteps

__all__ = ["KINDS", "RunnerKind", "current_kind", "make_runner", "use_kind"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RunnerKind:
    """How steps are computed, and by which kernels.

    Attributes:
        steps: None: what the device takes.
        kernels: None: what serves the CPU; "torch" or "triton".
        enforce_eager: without graphs.
    """

    steps: type[Steps] | None = None
    kernels: str | None = None
    enforce_eager: bool = False

    def enter(self, monkeypatch) -> None:
        """Makes its kernels serve the CPU until the test ends."""
        if self.kernels is not None:
            modules = _modules(self.kernels)
            monkeypatch.setattr(kernels, "_modules", lambda: modules)

    def make(self, config: EngineConfig) -> ModelRunner:
        """A runner; to be made, and used, in tests that entered."""
        config = replace(config, enforce_eager=self.enforce_eager)
        return ModelRunner(config, progress=False, make_steps=self.steps)


def _modules(name: str) -> Mapping[tuple[str, torch.dtype], ModuleType]:
    if name == "torch":
        return MappingProxyType({})
    ops = import_module("kernels.triton.ops")
    return MappingProxyType({("cpu", dtype): ops for dtype in _DTYPES})


KINDS = {
    "host": RunnerKind(),
    "device, eager": RunnerKind(DeviceSteps, enforce_eager=True),
    "device, graphs": RunnerKind(TracedDeviceSteps, kernels="torch"),
    "device, triton": RunnerKind(RerunDeviceSteps, kernels="triton"),
}


_current = {"kind": "host"}


def use_kind(name: str, monkeypatch) -> None:
    """Makes runners of that kind, and its kernels serve the CPU, until the test ends."""
    monkeypatch.setitem(_current, "kind", name)
    KINDS[name].enter(monkeypatch)


def current_kind() -> str:
    """The name of what `make_runner` makes."""
    return _current["kind"]


def make_runner(config: EngineConfig) -> ModelRunner:
    """A runner of the current kind."""
    return KINDS[current_kind()].make(config)
