"""The device chosen by a flag, and the defaults that depend on it."""

from types import SimpleNamespace

import pytest
import torch

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.runtime import device as device_module
from engine.runtime.device import fetch, resolve_device, with_device_defaults

CPU = torch.device("cpu")


@pytest.fixture
def one_gpu(monkeypatch):
    """Makes torch report a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda name: None)
    set_memory(monkeypatch, 80)


def set_memory(monkeypatch, gibibytes):
    properties = SimpleNamespace(total_memory=gibibytes << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_without_triton_is_refused_with_the_command_that_installs_it(monkeypatch):
    assert resolve_device("auto") == torch.device("cuda", 0)
    monkeypatch.setattr(device_module, "find_spec", lambda name: None)
    for name in ("auto", "cuda", "cuda:0"):
        with pytest.raises(ConfigurationError, match=rf"--device {name} .* pip install 'baton-llm"):
            resolve_device(name)
    assert resolve_device("cpu") == CPU


@pytest.mark.usefixtures("one_gpu")
def test_steps_overlap_on_a_gpu_unless_a_flag_changes_it():
    assert with_device_defaults(EngineConfig(model="m")).async_scheduling is True
    assert with_device_defaults(EngineConfig(model="m", device="cpu")).async_scheduling is False
    for chosen in (False, True):
        config = EngineConfig(model="m", async_scheduling=chosen)
        assert with_device_defaults(config).async_scheduling is chosen


@pytest.mark.usefixtures("one_gpu")
def test_steps_are_bounded_by_time_on_a_cpu_unless_a_flag_changes_it():
    assert with_device_defaults(EngineConfig(model="m")).max_step_ms == 0
    assert with_device_defaults(EngineConfig(model="m", device="cpu")).max_step_ms == "auto"
    for device, chosen in (("cpu", 0), ("cuda", "auto"), ("cpu", 50.0)):
        config = EngineConfig(model="m", device=device, max_step_ms=chosen)
        assert with_device_defaults(config).max_step_ms == chosen


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("gibibytes", "utilization", "expected"),
    [
        (141, 0.9, (256, 8192)),
        (80, 0.9, (256, 8192)),
        (80, 0.45, (128, 4096)),  # one of two workers
        (24, 0.9, (128, 4096)),
        (16, 0.9, (64, 2048)),
    ],
)
def test_steps_are_larger_the_more_memory_a_worker_may_use(
    monkeypatch, gibibytes, utilization, expected
):
    set_memory(monkeypatch, gibibytes)
    config = with_device_defaults(EngineConfig(model="m", gpu_memory_utilization=utilization))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == expected
    assert (config.max_step_seqs, config.max_step_tokens) == expected


@pytest.mark.usefixtures("one_gpu")
def test_a_step_has_the_size_that_flags_give_it():
    config = with_device_defaults(EngineConfig(model="m", max_num_seqs=7))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (7, 8192)
    config = with_device_defaults(EngineConfig(model="m", device="cpu", max_num_batched_tokens=9))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 9)


def test_fetched_tensors_are_copies():
    tensor = torch.arange(3)
    fetched = fetch(CPU, [tensor])
    tensor.zero_()
    fetched.wait()
    assert fetched.tensors[0].tolist() == [0, 1, 2]
