"""GGUF files of each family describe the model that they were made from, in config and tensors."""

import gguf
import numpy as np
import pytest
import torch

from baton.common.errors import ConfigurationError
from tests.support.described_models import described_model
from tests.support.gguf_families import (
    FAMILIES,
    family_contents,
    family_model,
    has_offset,
    save_family,
)
from tests.support.gguf_files import write_gguf
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request

# Longer than the windows and than the original length of scaled rotary embeddings.
PROMPT = torch.arange(70).remainder(251)[None]

# One of each way in which files differ from checkpoints, through the engine.
SERVED = (
    "gemma3",
    "phi3_long",
    "granite",
    "olmo3",
    "glm4",
    "cohere2",
    "qwen2_moe",
    "mixtral",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_describes_the_model_that_it_was_made_from(name, tmp_path):
    model = family_model(name)
    described = described_model(save_family(tmp_path / "model.gguf", model, part_tensors=20))
    expected, found = model.state_dict(), described.state_dict()
    assert found.keys() == expected.keys()
    for tensor, weight in expected.items():
        stored = weight + 1 - 1 if has_offset(model.config, tensor) else weight
        tolerance = 1e-6 if tensor.endswith("A_log") else 0  # the file has its exponential
        torch.testing.assert_close(found[tensor], stored, rtol=tolerance, atol=tolerance)
    model.load_state_dict(found)
    with torch.inference_mode():
        assert torch.equal(described(PROMPT).logits, model(PROMPT).logits)


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    model = family_model(name)
    path = save_family(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.Q8_0)
    described = described_model(path)
    core = build_core(path, "both")
    try:
        request = engine_request("a", tuple(PROMPT[0].tolist()), max_tokens=16, ignore_eos=True)
        drawn = tokens_of(run_all(core, [request])["a"])
    finally:
        core.close()
    tokens = torch.tensor([[*PROMPT[0].tolist(), *drawn]])
    with torch.inference_mode():
        assert described(tokens).logits[0, PROMPT.shape[1] - 1 : -1].argmax(-1).tolist() == drawn


def test_layers_that_draft_tokens_are_left_out(tmp_path):
    model = family_model("qwen3_5")
    metadata, tensors = family_contents(model)
    metadata |= {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    tensors["blk.4.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32), None
    tensors["blk.4.attn_norm.weight"] = np.zeros(64, np.float32), None
    described = described_model(write_gguf(tmp_path / "model.gguf", metadata, tensors))
    assert described.state_dict().keys() == model.state_dict().keys()
    assert described.config.num_hidden_layers == 4


def test_older_files_have_the_joined_projections_in_one_tensor(tmp_path):
    model = family_model("qwen3_next")
    metadata, tensors = family_contents(model)
    joined = "model.layers.{}.linear_attn.in_proj_qkvz.weight"
    for layer in (0, 2):
        del tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]
        weight = model.state_dict()[joined.format(layer)].numpy()
        tensors[f"blk.{layer}.ssm_in.weight"] = weight, None
    described = described_model(write_gguf(tmp_path / "model.gguf", metadata, tensors))
    for layer in (0, 2):
        name = joined.format(layer)
        assert torch.equal(described.state_dict()[name], model.state_dict()[name])


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("qwen3_next", "blk.0.attn_gate.weight", None, "it has no tensor blk.0.attn_gate.weight"),
        ("qwen3_next", "blk.0.attn_gate.weight", (144, 32), r"attn_gate.weight has shape"),
        ("qwen3_next", "qwen3next.ssm.inner_size", 145, "qwen3next.ssm.inner_size 145 is not"),
        ("qwen3_5", "blk.0.ssm_out.weight", (64, 143), r"\[64, 143\]; the model has 144 columns"),
        ("qwen3_5", "qwen35.ssm.group_count", 4, "qwen35.ssm.group_count 4 is not supported"),
        ("qwen3_5", "qwen35.nextn_predict_layers", 4, "nextn_predict_layers 4 is not supported"),
        ("qwen3_next", "qwen3next.nextn_predict_layers", 1, "nextn_predict_layers 1 is not"),
        ("glm4_moe", "glm4moe.expert_gating_func", 1, "glm4moe.expert_gating_func 1 is not"),
        ("deepseek_v3", "deepseek2.expert_gating_func", 3, "deepseek2.expert_gating_func 3 is"),
        ("deepseek_v3", "deepseek2.attention.key_length_mla", 8, "attention.key_length 32 is not"),
        ("deepseek_v2", "deepseek2.rope.scaling.type", "linear", "rope.scaling.type 'linear' is"),
        ("deepseek_v2", "deepseek2.rope.scaling.yarn_log_multiplier", 0.0, "yarn_log_multiplier"),
        ("gpt_oss", "gpt-oss.rope.freq_base_swa", 5000.0, "rope.freq_base_swa 5000.0 is not"),
        ("cohere", "command-r.logit_scale", None, "it has no command-r.logit_scale"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(name, key, value, reason, tmp_path):
    metadata, tensors = family_contents(family_model(name))
    if not key.startswith("blk."):
        metadata[key] = value
    elif value is None:
        del tensors[key]
    else:
        tensors[key] = np.zeros(value, np.float32), None
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(ConfigurationError, match=reason):
        described_model(path)
