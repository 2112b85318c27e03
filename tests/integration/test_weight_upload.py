"""Weights are copied to a device through two small buffers; the CPU stands in for the device."""

import threading
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from baton.common.errors import ConfigurationError
from engine.runtime.weights import loader
from engine.runtime.weights.loader import load_model
from engine.runtime.weights.safetensors_file import locate_tensors
from engine.runtime.weights.weight_upload import HostBuffer, upload
from tests.support.checkpoints import VARIANTS, tiny_checkpoint

_CPU = torch.device("cpu")


class StrictBuffer(HostBuffer):
    """A buffer that fails if it is overwritten while the device copies from it."""

    made: ClassVar[list] = []

    def __init__(self, num_bytes, device):
        super().__init__(num_bytes, device)
        self.is_copied_from, self.threads = False, set()
        self.made.append(self)

    def send(self, target):
        assert not self.is_copied_from
        super().send(target)
        self.is_copied_from = True

    def wait(self):
        self.threads.add(threading.current_thread().name)
        self.is_copied_from = False


@pytest.fixture
def stored(tmp_path):
    """Saves tensors of odd sizes and several types; returns them and their places by name."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(1, generator=generator).bfloat16(),
        "c": torch.randn(17, 9, generator=generator).half(),
        "d": torch.randn(64, generator=generator).double(),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors, locate_tensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize("buffer_bytes", [1, 7, 16, 61, 4096])
def test_every_byte_is_copied_for_any_size_of_the_buffers(stored, buffer_bytes):
    tensors, places = stored
    targets = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    copied = []
    weights = [(places[name], target) for name, target in targets.items()]
    upload(weights, _CPU, copied.append, buffer_bytes=buffer_bytes, make_buffer=StrictBuffer)
    for name, target in targets.items():
        assert torch.equal(target, tensors[name]), name
    assert len(copied) == len(tensors) - 1  # the empty tensor needs no copy


def test_the_device_converts_types_and_order(stored):
    tensors, places = stored
    narrow, turned = torch.empty(64, dtype=torch.bfloat16), torch.empty(9, 17)
    upload([(places["d"], narrow), (places["c"], turned.t())], _CPU, lambda _: None, buffer_bytes=8)
    assert torch.equal(narrow, tensors["d"].bfloat16())
    assert torch.equal(turned, tensors["c"].float().t())


def test_buffers_are_overwritten_only_after_the_device_has_copied_them(stored):
    tensors, places = stored
    StrictBuffer.made.clear()
    target = torch.empty(64, dtype=torch.float64)
    weights = [(places["d"], target)]
    upload(weights, _CPU, lambda _: None, buffer_bytes=16, make_buffer=StrictBuffer)
    assert torch.equal(target, tensors["d"])
    assert len(StrictBuffer.made) == 2
    for buffer in StrictBuffer.made:
        assert any(name.startswith("weights-reader") for name in buffer.threads)
        assert not buffer.is_copied_from


@pytest.mark.parametrize("variant", sorted({*VARIANTS, "glm4", "phi3"}))
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_models_load_the_same_weights_as_without_an_upload(variant, dtype, monkeypatch):
    folder = str(tiny_checkpoint(variant))
    expected = load_model(folder, dtype, "cpu", progress=False)
    monkeypatch.setattr(loader, "_UPLOADED_TO", ("cpu",))
    monkeypatch.setattr(loader, "upload", _with_small_buffers)
    loaded = load_model(folder, dtype, "cpu", progress=False)
    assert loaded.fingerprint == expected.fingerprint
    pairs = zip(_weights_of(loaded), _weights_of(expected), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def _with_small_buffers(weights, device, on_copied):
    upload(weights, device, on_copied, buffer_bytes=1000, make_buffer=StrictBuffer)


def _weights_of(loaded):
    packed = [module for module in loaded.model.modules() if hasattr(module, "allocate")]
    return [m.weight.data for m in packed] + [p.data for p in loaded.model.parameters()]


def test_a_truncated_file_is_an_error(stored):
    _, places = stored
    file = places["d"].file
    file.write_bytes(file.read_bytes()[: places["d"].offset + 100])
    target = torch.empty(64, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors ends before its last tensor"):
        upload([(places["d"], target)], _CPU, lambda _: None, buffer_bytes=64)


def test_a_deleted_file_is_an_error(stored):
    _, places = stored
    places["d"].file.unlink()
    target = torch.empty(64, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors cannot be read"):
        upload([(places["d"], target)], _CPU, lambda _: None)


def test_a_failure_of_the_device_ends_the_reader_thread(stored):
    _, places = stored
    before = threading.active_count()

    class Broken:
        nbytes = 512
        shape = (64,)

        def copy_(self, source):
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        upload([(places["d"], Broken())] * 50, _CPU, lambda _: None, buffer_bytes=64)
    assert threading.active_count() == before
