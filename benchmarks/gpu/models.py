"""Models of random weights: their folders, their sizes, and an engine's config for them."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.plan import MODELS, Plan
from benchmarks.model_cost import ModelShape
from benchmarks.models import write_dummy_model
from engine.config import EngineConfig
from engine.models.config_fields import ConfigFields
from engine.models.registry import family_of
from kvstore.layout import DTYPE_BYTES

__all__ = ["engine_config", "kv_bytes_per_token", "shape_of", "write_config"]

_SPARE_TOKENS = 64
"""Room of a row beyond the context it is measured at: steps make it longer."""


def write_config(name: str, dtype: str, folder: Path) -> Path:
    """Writes one of `MODELS`, without weights, into a folder of its own; returns that."""
    return write_dummy_model(MODELS[name] | {"dtype": dtype}, folder / name)


def engine_config(plan: Plan, folder: Path, **flags: Any) -> EngineConfig:
    """Returns the config of an engine with random weights, as large as the plan needs.

    Args:
        plan: the sizes of the run.
        folder: has the model's config.json.
        flags: fields of `EngineConfig` that replace the defaults here.
    """
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
    """Returns a model's size, counted on a model without memory (torch's device "meta")."""
    config = MODELS[name]
    family = family_of(config["architectures"][0])
    with torch.device("meta"):
        model = family.build(family.read_config(ConfigFields(config, family.model_type)))
    return ModelShape.of_config(config, model.num_weights(), dtype)


def kv_bytes_per_token(name: str, dtype: str) -> int:
    """Returns the bytes of a token's keys and values over all layers."""
    config = MODELS[name]
    features = config["num_key_value_heads"] * config["head_dim"]
    return int(2 * config["num_hidden_layers"] * features * DTYPE_BYTES[dtype])
