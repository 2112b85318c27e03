"""GGUF files of each family describe the model that they were made from, in config and tensors."""

import re
from collections import defaultdict

import gguf
import pytest
import torch
import transformers

from baton.common.model_files.gguf import GgufFile
from engine.runtime.weights.gguf_weights import GgufWeights
from tests.support.gguf_families import FAMILIES, family_model, save_family
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request

# Longer than the windows and than the original length of scaled rotary embeddings.
PROMPT = torch.arange(70).remainder(251)[None]

# One of each way in which files differ from checkpoints, through the engine.
SERVED = ("gemma3", "phi3_long", "granite", "olmo3", "glm4", "qwen2_moe", "mixtral")


def described_model(path):
    """The model of `transformers` that the config and the tensors of a file describe."""
    file = GgufFile(path)
    config = file.read_json("config.json")
    config_class = type(transformers.AutoConfig.for_model(config["model_type"]))
    described = config_class(**{"pad_token_id": None, **config})
    described._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32).eval()
    assert config["architectures"] == [type(model).__name__]
    weights = {}
    for part in file.header.parts:
        with GgufWeights(file.header, part, torch.float32) as tensors:
            weights |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    weights = joined_experts(weights, is_gpt_oss=config["model_type"] == "gpt_oss")
    if described.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model


def joined_experts(weights, *, is_gpt_oss):
    """The weights with those of all experts in one tensor, as `transformers` has them in memory."""
    stacks, others = defaultdict(dict), {}
    for name, weight in weights.items():
        expert = re.fullmatch(r"(.+\.)experts\.(\d+)\.(\w+)\.(weight|bias)", name)
        if expert is None:
            others[name.replace("block_sparse_moe", "mlp")] = weight
            continue
        parent, number, part, suffix = expert.groups()
        part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part, part)
        parent = parent.replace("block_sparse_moe", "mlp")
        stacks[f"{parent}experts", suffix].setdefault(part, {})[int(number)] = weight
    for (parent, suffix), parts in stacks.items():
        gate, up, down = (
            torch.stack([parts[part][number] for number in range(len(parts[part]))])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        ending = "_bias" if suffix == "bias" else ""
        both = torch.stack([gate, up], 2).flatten(1, 2) if is_gpt_oss else torch.cat([gate, up], 1)
        for part, stack in (("gate_up_proj", both), ("down_proj", down)):
            swapped = stack.transpose(1, 2) if is_gpt_oss and not ending else stack
            others[f"{parent}.{part}{ending}"] = swapped
    return others


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_describes_the_model_that_it_was_made_from(name, tmp_path):
    model = family_model(name)
    described = described_model(save_family(tmp_path / "model.gguf", model, part_tensors=20))
    expected, found = model.state_dict(), described.state_dict()
    assert found.keys() == expected.keys()
    for tensor, weight in expected.items():
        is_offset = name.startswith("gemma") and tensor.endswith("norm.weight")
        stored = weight + 1 - 1 if is_offset else weight
        assert torch.equal(found[tensor], stored), tensor
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
