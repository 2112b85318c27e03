"""Weights on the device, from a checkpoint or random."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from engine.runtime.weights.loader import LoadedModel, load_model
from engine.runtime.weights.safetensors_file import locate_tensors
from engine.runtime.weights.weight_upload import upload
from tests.support.checkpoints import tiny_checkpoint
from tests.support.devices import DEVICE

_VARIANTS = ("llama", "llama_sharded", "llama_tied_biased", "qwen3", "opt", "gpt2")


def test_tensors_larger_than_the_upload_buffers_arrive_unchanged(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "large": torch.randn(1001, 1003, generator=generator),
        "narrow": torch.randn(700_001, generator=generator).bfloat16(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    places = locate_tensors(tmp_path / "model.safetensors")
    targets = {
        "large": torch.empty(1003, 1001, dtype=torch.bfloat16, device=DEVICE).t(),
        "narrow": torch.empty(700_001, device=DEVICE),
    }
    weights = [(places[name], target) for name, target in targets.items()]
    upload(weights, DEVICE, lambda _: None, buffer_bytes=2**18)
    for name, target in targets.items():
        assert torch.equal(target.cpu(), tensors[name].to(target.dtype)), name


def _load(folder, dtype="auto", device=DEVICE, **options) -> LoadedModel:
    return load_model(str(folder), dtype, device, progress=False, **options)


def _parameters(loaded):
    """Norms, biases, and the weights of layers that allocate their own memory."""
    weights = {
        name: module.weight.data
        for name, module in loaded.model.named_modules()
        if hasattr(module, "allocate")
    }
    return weights | {name: value.data for name, value in loaded.model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", _VARIANTS)
def test_weights_on_the_device_equal_those_on_the_cpu(variant, dtype):
    folder = tiny_checkpoint(variant)
    on_device, on_cpu = _load(folder, dtype), _load(folder, dtype, "cpu")
    token_ids = torch.arange(0, 200, 7)
    names = ("embed_tokens", "wte")
    (name,) = (name for name in names if hasattr(on_device.model, name))
    embedded = getattr(on_device.model, name)(token_ids.to(DEVICE))
    assert torch.equal(embedded.cpu(), getattr(on_cpu.model, name)(token_ids))
    assert on_device.fingerprint == on_cpu.fingerprint
    hidden = embedded[:, : on_cpu.model.config.hidden_size]
    expected = on_cpu.model.logits(hidden.cpu())
    torch.testing.assert_close(on_device.model.logits(hidden).cpu(), expected, atol=0.05, rtol=0.02)


def test_all_tensors_are_on_the_device():
    loaded = _load(tiny_checkpoint("llama"))
    assert {value.device.type for value in _parameters(loaded).values()} == {DEVICE.type}
    buffers = {buffer.device.type for buffer in loaded.model.buffers()}
    assert buffers <= {DEVICE.type}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_are_drawn_on_the_device_and_repeat(tmp_path, dtype):
    shutil.copy(tiny_checkpoint("llama") / "config.json", tmp_path)
    first, second = (_load(tmp_path, dtype, load_format="dummy") for _ in range(2))
    assert first.fingerprint == second.fingerprint
    pairs = zip(_parameters(first).values(), _parameters(second).values(), strict=True)
    for one, other in pairs:
        assert one.device.type == DEVICE.type
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)
