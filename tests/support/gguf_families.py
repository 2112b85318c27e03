"""Writes GGUF files of tiny models of all families, as llama.cpp's converter does.

Names of tensors are those of the `gguf` package.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.support.gguf_files import BYTE_TOKENIZER, in_pairs, stored_array, write_gguf

_F32 = gguf.GGMLQuantizationType.F32
_SUFFIXES = (".weight", ".bias")
_SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + i for i in range(6)],
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_LOCAL = {"rope_type": "default", "rope_theta": 1e4}
# Three heads of values for each of two heads of keys.
_DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 40,
    "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}

# By name, the class of a config and its fields.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8}),
    "gemma2_27b": (
        "Gemma2Config",
        {"head_dim": 24, "query_pre_attn_scalar": 16, "num_hidden_layers": 46},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "num_hidden_layers": 8,
            "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _LOCAL},
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 7}),
    "phi3_long": (
        "Phi3Config",
        {"original_max_position_embeddings": 64, "rope_parameters": _LONG, "sliding_window": None},
    ),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 8,
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": _LOCAL},
        },
    ),
    "glm4": ("Glm4Config", {"head_dim": 16, "attention_bias": True}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", {"head_dim": 16, "logit_scale": 0.25, "sliding_window": 8}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 24, "use_bias": False}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 24}),
    "smollm3": ("SmolLM3Config", {}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_DELTA,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "num_nextn_predict_layers": 0,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **_DELTA,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-6,
        },
    ),
}
_FILE_ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    "cohere": "command-r",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}


def family_model(name: str, **changes: Any) -> Any:
    """Returns a model of `transformers` with random weights, also of its norms and biases.

    Args:
        name: one of `FAMILIES`.
        changes: other values of its config.
    """
    class_name, fields = FAMILIES[name]
    config = getattr(transformers, class_name)(**{**_SIZES, **fields, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn(buffer.shape) * 0.3)
        for weight in model.parameters():
            deviation = 0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            weight.add_(torch.randn(weight.shape) * deviation)
    return model


def save_family(
    path: Path,
    model: Any,
    kind: gguf.GGMLQuantizationType = _F32,
    part_tensors: int = 0,
) -> Path:
    """Writes a model; see `write_gguf`.

    Args:
        path: of the file.
        model: of `transformers`.
        kind: type of the matrices whose rows are whole blocks; experts of gpt-oss are in MXFP4
            unless it is F32.
        part_tensors: how many tensors a file has at most; 0 for all of them in one.
    """
    return write_gguf(path, *family_contents(model, kind), part_tensors)


def family_contents(
    model: Any, kind: gguf.GGMLQuantizationType = _F32
) -> tuple[dict[str, Any], dict[str, tuple[np.ndarray, int | None]]]:
    """Returns the metadata and the tensors that `save_family` writes."""
    config = model.config
    architecture = _FILE_ARCHITECTURES.get(config.model_type, config.model_type)
    tensors = {
        name: stored_array(np.ascontiguousarray(array), _kind_of(name, array, kind, architecture))
        for name, array in _tensors(model, architecture)
    }
    keys = {f"{architecture}.{key}": value for key, value in _keys(config).items()}
    return {"general.architecture": architecture, **BYTE_TOKENIZER, **keys}, tensors


def _kind_of(
    name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType, architecture: str
) -> gguf.GGMLQuantizationType:
    if not name.endswith(".weight") or array.shape[-1] % 32:
        return _F32
    is_expert = architecture == "gpt-oss" and "_exps." in name
    return gguf.GGMLQuantizationType.MXFP4 if is_expert and kind != _F32 else kind


def _keys(config: Any) -> dict[str, Any]:
    """The keys of the file, without the architecture."""
    head_dim = getattr(config, "head_dim", None)
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **_rope_keys(config),
        **_KEYS.get(config.model_type, lambda _: {})(config),
    }


def _rope_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    keys = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    return keys


def _gemma2_keys(config: Any) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
    }


def _phi3_keys(config: Any) -> dict[str, Any]:
    share = config.rope_parameters["partial_rotary_factor"]
    original = config.original_max_position_embeddings
    keys = {
        "rope.dimension_count": int(share * config.hidden_size) // config.num_attention_heads,
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": config.sliding_window or 0,
    }
    if config.rope_parameters["rope_type"] == "longrope":
        scale = config.max_position_embeddings / original
        factor = (1 + np.log(scale) / np.log(original)) ** 0.5
        keys["rope.scaling.attn_factor"] = float(factor)
    return keys


def _granite_keys(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _olmo3_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [
            layer_type == "sliding_attention" for layer_type in config.layer_types
        ],
    }


def _expert_keys(config: Any) -> dict[str, Any]:
    kept = {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        **{key: getattr(config, name, None) for key, name in kept.items()},
    }


def _glm4_moe_keys(config: Any) -> dict[str, Any]:
    return {
        "rope.dimension_count": config.head_dim // 2,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_shared_count": config.n_shared_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
    }


def _deepseek_keys(config: Any) -> dict[str, Any]:
    query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    keys = _glm4_moe_keys(config) | {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": query_dim,
        "attention.value_length": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.yarn_log_multiplier": 0.1 * config.rope_parameters["mscale_all_dim"],
        "vocab_size": config.vocab_size,
    }
    if config.model_type == "deepseek_v2":
        return keys | {"expert_gating_func": 1}
    return keys | {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": query_dim,
        "attention.value_length_mla": config.v_head_dim,
    }


def _gpt_oss_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base_swa": float(config.rope_parameters["rope_theta"]),
    }


def _cohere_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "logit_scale": config.logit_scale,
        "rope.scaling.type": "none",
    }


def _delta_keys(config: Any) -> dict[str, Any]:
    return {
        "full_attention_interval": 2,
        "rope.dimension_count": config.head_dim // 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.time_step_rank": config.linear_num_value_heads,
    }


def _lfm2_keys(config: Any) -> dict[str, Any]:
    num_kv_heads = config.num_key_value_heads
    return {
        "attention.head_count_kv": [
            0 if layer_type == "conv" else num_kv_heads for layer_type in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
        "vocab_size": config.vocab_size,
    }


_SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0]}
_KEYS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "gemma2": _gemma2_keys,
    "gemma3_text": lambda config: {"attention.sliding_window": config.sliding_window},
    "phi3": _phi3_keys,
    "granite": _granite_keys,
    "olmo3": _olmo3_keys,
    "glm4": lambda config: {"rope.dimension_count": config.head_dim // 2},
    "smollm3": lambda config: {"vocab_size": config.vocab_size},
    "qwen2_moe": _expert_keys,
    "qwen3_moe": _expert_keys,
    "mixtral": _expert_keys,
    "olmoe": _expert_keys,
    "glm4_moe": _glm4_moe_keys,
    "deepseek_v2": _deepseek_keys,
    "deepseek_v3": _deepseek_keys,
    "gpt_oss": _gpt_oss_keys,
    "cohere": _cohere_keys,
    "cohere2": _cohere_keys,
    "qwen3_next": lambda config: _delta_keys(config) | _expert_keys(config),
    "qwen3_5_text": lambda config: _delta_keys(config) | _SECTIONS,
    "qwen3_5_moe_text": lambda config: _delta_keys(config) | _SECTIONS | _expert_keys(config),
    "lfm2": _lfm2_keys,
}


def _tensors(model: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the file's tensors."""
    config = model.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    for name, array in _delta_tensors(_apart(model), config):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name.replace("_correction_bias", "_correction.bias"), _SUFFIXES)
        assert stored is not None, name
        is_rotated = ".q_proj." in name or ".k_proj." in name
        if has_offset(config, name):
            yield stored, array + 1
        elif config.model_type in ("llama", "granite", "smollm3", "mixtral") and is_rotated:
            yield stored, in_pairs(array, config.hidden_size // config.num_attention_heads)
        else:
            yield stored, array
    for name in ("long", "short"):
        if factors := config.rope_parameters.get(f"{name}_factor"):
            yield f"rope_factors_{name}.weight", np.array(factors, np.float32)


def has_offset(config: Any, name: str) -> bool:
    """Whether the file has the weight of a norm plus one."""
    is_norm = name.endswith("norm.weight") and "linear_attn" not in name
    return is_norm and config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5"))


def _delta_tensors(
    tensors: Iterator[tuple[str, np.ndarray]], config: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields tensors as the converter makes them of those of gated delta nets."""
    for name, array in tensors:
        parent, _, part = name.rpartition("linear_attn.")
        if config.model_type == "deepseek_v3" and name.endswith(".kv_b_proj.weight"):
            heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
            yield name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), values
            continue
        if not parent:
            yield name, array
        elif part == "in_proj_qkvz.weight":
            yield from _apart_by_heads(f"{parent}linear_attn.", array, config)
        else:
            stored = -np.exp(array) if part == "A_log" else array
            if "3_5" in config.model_type:
                stored = _by_last_heads(part, stored, config)
            yield name.replace("dt_bias", "dt_proj.bias"), stored


def _apart_by_heads(
    prefix: str, array: np.ndarray, config: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the projections that the checkpoint has by heads of keys, under Qwen3.5's names."""
    num_keys, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // num_keys * config.linear_value_head_dim
    heads = array.reshape(num_keys, -1, array.shape[-1])
    bounds = [key_dim, 2 * key_dim, 2 * key_dim + values]
    *qkv, gate = (part.reshape(-1, array.shape[-1]) for part in np.split(heads, bounds, 1))
    yield f"{prefix}in_proj_qkv.weight", np.concatenate(qkv)
    yield f"{prefix}in_proj_z.weight", gate


def _by_last_heads(part: str, array: np.ndarray, config: Any) -> np.ndarray:
    """Orders heads of values: the first of each head of keys, then the second, and so on."""
    num_keys, dim = config.linear_num_key_heads, config.linear_value_head_dim
    keys = 2 * num_keys * config.linear_key_head_dim

    def ordered(rows: np.ndarray, width: int) -> np.ndarray:
        heads = rows.reshape(num_keys, -1, width, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([array[:keys], ordered(array[keys:], dim)])
    if part == "out_proj.weight":
        return ordered(array.T, dim).T
    if part == "norm.weight":
        return array
    return ordered(array, dim if part == "in_proj_z.weight" else 1)


def _apart(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the model's tensors as the converter names them, gates apart from up projections."""
    swaps_axes = model.config.model_type == "gpt_oss"
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        parent, _, part = name.rpartition(".")
        if not parent.endswith(".experts"):
            yield f"{name}.weight" if part == "sinks" else name, array.squeeze()
            continue
        suffix = "bias" if part.endswith("_bias") else "weight"
        if swaps_axes and suffix == "weight":
            array = array.swapaxes(1, 2)
        if part.startswith("down_proj"):
            yield f"{parent}.down_proj.{suffix}", array
            continue
        half = array.shape[1] // 2
        gate, up = (array[:, ::2], array[:, 1::2]) if swaps_axes else np.split(array, [half], 1)
        yield f"{parent}.gate_proj.{suffix}", gate
        yield f"{parent}.up_proj.{suffix}", up
