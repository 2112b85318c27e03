"""`--load-format dummy`: random weights in the shape of a config.json, without weight files."""

import re
import shutil
from pathlib import Path

import pytest
import torch

import kernels
from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.runtime.weights import checkpoint as checkpoint_module
from engine.runtime.weights.loader import LoadedModel, load_model
from tests.support.checkpoints import EOS_TOKEN_ID, VARIANTS, tiny_checkpoint
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with only the config.json of a small Llama."""
    shutil.copy(tiny_checkpoint("llama") / "config.json", tmp_path)
    return tmp_path


def load(folder: Path, dtype: str = "auto", **options: str) -> LoadedModel:
    return load_model(str(folder), dtype, "cpu", progress=False, load_format="dummy", **options)


def weights_of(loaded: LoadedModel) -> list[torch.Tensor]:
    packed = [m.weight.data for m in loaded.model.modules() if hasattr(m, "allocate")]
    return [*packed, *(parameter.data for parameter in loaded.model.parameters())]


def test_a_config_alone_is_enough(folder):
    loaded = load(folder)
    assert loaded.eos_token_ids == (EOS_TOKEN_ID,)
    assert loaded.dtype == "float32"
    for weight in weights_of(loaded):
        assert torch.isfinite(weight).all()
        assert weight.any()


def test_every_load_has_the_same_weights(folder):
    pairs = zip(weights_of(load(folder)), weights_of(load(folder)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_norms_are_ones_and_matrices_differ(folder):
    layers = load(folder).model.layers
    assert torch.equal(layers["0"].input_layernorm.weight, torch.ones(64))
    first, second = (layers[name].self_attn.o_proj.weight.data for name in ("0", "1"))
    assert not torch.equal(first, second)
    assert 0.015 < float(first.float().std()) < 0.025


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_family_generates_finite_tokens(variant, tmp_path):
    shutil.copy(tiny_checkpoint(variant) / "config.json", tmp_path)
    core = build_core(tmp_path, "both", load_format="dummy")
    request = engine_request(request_id="one", prompt_token_ids=tuple(range(20)), max_tokens=3)
    tokens = tokens_of(run_all(core, [request])["one"])
    core.close()
    assert len(tokens) == 3
    assert min(tokens) >= 0


def test_the_fingerprint_depends_on_the_config_but_not_on_weights(folder):
    before = load(folder).fingerprint
    assert before == load(tiny_checkpoint("llama")).fingerprint  # its weights are not read
    assert (
        before
        != load_model(str(tiny_checkpoint("llama")), "auto", "cpu", progress=False).fingerprint
    )
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert load(folder).fingerprint != before


def test_a_missing_config_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        load(tmp_path)


def test_too_little_memory_is_an_error(folder):
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"vocab_size": 259', f'"vocab_size": {10**12}'))
    sizes = []
    for quantization in ("none", "int8"):
        with pytest.raises(ConfigurationError) as failure:
            load(folder, quantization=quantization)
        pattern = r"cannot allocate (\d+) MiB on cpu for the weights"
        sizes.append(int(re.match(pattern, failure.value.message)[1]))
    plain = 2 * 4 * 64 * 10**12 // 2**20  # a table and a head of float32
    assert sizes[0] == pytest.approx(plain, rel=1e-3)
    is_served = kernels.served_formats(torch.device("cpu"), torch.float32).exact
    rounded = plain * (64 * 4 + 64 + 4) / (2 * 64 * 4) if is_served else plain
    assert sizes[1] == pytest.approx(rounded, rel=1e-3)


def test_a_hub_model_is_downloaded_without_its_weights(folder, monkeypatch):
    import huggingface_hub

    requested = []

    def download(name, revision, allow_patterns):
        requested.extend([name, revision, *allow_patterns])
        return folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint_module.open_checkpoint("org/model@v2", with_weights=False)
    assert requested[:2] == ["org/model", "v2"]
    assert "*.json" in requested
    assert "*.safetensors" not in requested


def test_an_unknown_format_is_an_error():
    with pytest.raises(ConfigurationError, match="--load-format is 'gguf'; it must be one of auto"):
        EngineConfig(model="m", load_format="gguf")
