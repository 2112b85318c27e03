"""The text part of models that read images too, compared with `transformers`."""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.common.errors import ConfigurationError
from engine.runtime.weights.loader import load_model
from tests.support.checkpoints import (
    DECODER_VARIANTS,
    HYBRIDS,
    VOCAB_SIZE,
    prompt_of,
    randomize,
    save_byte_tokenizer,
)
from tests.support.paged_session import PagedSession

LENGTH = 43
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64}
QWEN_VISION |= {"num_heads": 2, "num_position_embeddings": 16}
# The rotary embedding of images and videos has a part of the angles for each axis.
MROPE = {"rope_theta": 1e4, "rope_type": "default", "mrope_interleaved": True}
MROPE |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.34}
# By variant: the prefix of `transformers`' classes, and the fields of both configs.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 24},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28},
    ),
    "gemma4": (
        "Gemma4",
        {**DECODER_VARIANTS["gemma4"][1]},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16},
    ),
    "qwen3_5": ("Qwen3_5", {**HYBRIDS["qwen3_5"][1], "rope_parameters": MROPE}, QWEN_VISION),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**HYBRIDS["qwen3_5_moe"][1], "rope_parameters": MROPE, "tie_word_embeddings": True},
        QWEN_VISION,
    ),
}
TOLERANCE = {"gemma3": 5e-5}
KV_NAMES = ("k_proj", "v_proj", "k_norm")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that writes a variant's checkpoint, and returns its folder and model."""

    @cache
    def _make(variant: str) -> tuple[Path, Any]:
        name, text, vision = MODELS[variant]
        outer = {"tie_word_embeddings": text.get("tie_word_embeddings", variant == "gemma3")}
        if variant == "gemma3":
            vision = {
                **vision,
                "num_attention_heads": 2,
                "patch_size": 14,
                "vision_use_head": False,
            }
            outer["mm_tokens_per_image"] = 4
        config = getattr(transformers, f"{name}Config")(
            text_config={**SMALL, **text}, vision_config=vision, **outer
        )
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        randomize(model, seed=crc32(variant.encode()))
        folder = tmp_path_factory.mktemp(variant)
        model.save_pretrained(folder)
        save_byte_tokenizer(folder)
        return folder, model

    return _make


def _logits(folder: Path) -> torch.Tensor:
    model = load_model(str(folder), "auto", "cpu", progress=False)
    session, prompt = PagedSession(model, [LENGTH]), prompt_of(LENGTH)
    return torch.cat([session.step([(0, part)])[0] for part in (prompt[:30], prompt[30:])])


@pytest.mark.parametrize("variant", MODELS)
def test_logits_are_those_of_transformers_for_texts(
    variant: str, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = make(variant)
    with caplog.at_level(logging.WARNING, "baton.engine"):
        logits = _logits(folder)
    num_tensors = sum("language_model" not in name for name in model.state_dict())
    assert len(caplog.records) == 1
    assert f"{num_tensors - 1} tensors of the parts that read images or sound" in caplog.text
    with torch.inference_mode():
        expected = model(torch.tensor([prompt_of(LENGTH)])).logits[0]
    assert (logits - expected).abs().max() < TOLERANCE.get(variant, 2e-4)


@pytest.mark.parametrize("variant", MODELS)
def test_tensors_have_the_names_of_several_releases(
    variant: str, make: Any, tmp_path: Path
) -> None:
    folder, _ = make(variant)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    expected = _logits(folder)
    text = {name: tensor for name, tensor in tensors.items() if "language_model" in name}
    head = {name: tensor for name, tensor in tensors.items() if name.endswith("lm_head.weight")}
    stems = {name: name.partition("language_model.")[2].removeprefix("model.") for name in text}
    forms = {
        "model.language_model": {
            f"model.language_model.{stems[name]}": text[name] for name in text
        },
        "language_model.model": {
            f"language_model.model.{stems[name]}": text[name] for name in text
        },
        "text alone": {f"model.{stems[name]}": text[name] for name in text},
    }
    drafts = {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.mlp.gate.weight": torch.ones(2, 2)}
    expert = (
        "mtp.layers.0.mlp.experts.0.gate_proj.weight"  # in another form than those of the model
    )
    drafts |= {expert: torch.ones(2, 2)}
    if variant == "gemma4":  # projections of layers that read the K and V of another one
        drafts |= {f"model.layers.6.self_attn.{name}.weight": torch.ones(2, 2) for name in KV_NAMES}
    for form, renamed in forms.items():
        written = tmp_path / form
        written.mkdir()
        (written / "config.json").write_text(json.dumps(config))
        prefix = "language_model." if form == "language_model.model" else ""
        heads = {f"{prefix}lm_head.weight": tensor for tensor in head.values()}
        save_file({**renamed, **heads, **drafts}, written / "model.safetensors", {"format": "pt"})
        assert torch.equal(_logits(written), expected)


def test_quantized_weights_are_refused_by_the_field_of_the_whole(make: Any, tmp_path: Path) -> None:
    folder, _ = make("qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="quant_method 'hqq' is not supported"):
        load_model(str(tmp_path), "auto", "cpu", progress=False, load_format="dummy")
