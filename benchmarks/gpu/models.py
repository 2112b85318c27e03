"""Models of random weights: their config.json, their size, and an engine's flags for them."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.plan import MODELS, Plan
from benchmarks.model_cost import ModelShape
from engine.config import EngineConfig
from engine.models.registry import family_of
from kvstore.layout import DTYPE_BYTES

__all__ = ["engine_config", "kv_bytes_per_token", "shape_of", "write_config"]

_SPARE_TOKENS = 64
"""Of a row beyond the context it is measured at: steps make it longer."""


def write_config(name: str, dtype: str, folder: Path) -> Path:
    """Writes a model's config.json into a folder of its own; returns that."""
    own = folder / name
    own.mkdir(exist_ok=True)
    (own / "config.json").write_text(json.dumps(MODELS[name] | {"dtype": dtype}))
    return own


def engine_config(plan: Plan, folder: Path, **flags: Any) -> EngineConfig:
    """An engine with random weights of the shape in `folder`, as large as the plan needs."""
    longest = max(
        *plan.contexts,
        *(length for _, length in plan.prompts),
        *(prompt + output for _, prompt, output in (*plan.tier_requests, plan.served)),
    )
    defaults: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": plan.dtype,
        "device": plan.device,
        "max_model_len": longest + 2 * plan.num_steps + _SPARE_TOKENS,
        "max_num_seqs": max(plan.batch_sizes),
        "max_num_batched_tokens": plan.max_batched_tokens,
        "swap_space": 0,
        "num_gpu_blocks_override": plan.num_gpu_blocks,
    }
    return EngineConfig(**(defaults | flags))


def shape_of(name: str, dtype: str) -> ModelShape:
    """A model's size, counted on the model itself, without memory for it."""
    from transformers import AutoConfig

    fields = dict(MODELS[name])
    family = family_of(fields.pop("architectures")[0])
    source = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = family.build(family.read_config(source))
    num_weights = sum(math.prod(part.shape) for part in model.checkpoint_tensors().values())
    return ModelShape.of_config(MODELS[name], num_weights, dtype)


def kv_bytes_per_token(name: str, dtype: str) -> int:
    """Of all layers, keys and values."""
    config = MODELS[name]
    features = config["num_key_value_heads"] * config["head_dim"]
    return int(2 * config["num_hidden_layers"] * features * DTYPE_BYTES[dtype])
