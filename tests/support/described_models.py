"""Models of `transformers` that the configs and the tensors of GGUF files describe."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers

from baton.common.model_files.gguf import GgufFile
from engine.runtime.weights.gguf_weights import GgufWeights

__all__ = ["described_model"]

_Weights = dict[str, torch.Tensor]


def described_model(path: Path) -> Any:
    """Returns the model of `transformers` that the config and the tensors of a file describe."""
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
    weights = _joined_heads(weights)
    weights = _joined_experts(weights, is_gpt_oss=config["model_type"] == "gpt_oss")
    if described.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model


def _joined_experts(weights: _Weights, *, is_gpt_oss: bool) -> _Weights:
    """Returns the weights with those of all experts in one tensor, as models have them."""
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


def _joined_heads(weights: _Weights) -> _Weights:
    """Returns the weights with the heads' matrices of latent attention in one."""
    for name in [name for name in weights if name.endswith(".k_b_proj.weight")]:
        keys = weights.pop(name).transpose(1, 2)
        values = weights.pop(name.replace("k_b", "v_b"))
        weights[name.replace("k_b", "kv_b")] = torch.cat([keys, values], 1).flatten(0, 1)
    return weights
