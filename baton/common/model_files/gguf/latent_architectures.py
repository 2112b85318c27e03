"""GGUF files of models with latent attention: DeepSeek-V2 and later, GLM-4.7-Flash."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from baton.common.model_files.gguf.architecture import GgufArchitecture
from baton.common.model_files.gguf.expert_architectures import (
    GROUPED_EXPERT_KEYS,
    GROUPED_EXPERT_NAMES,
    grouped_expert_fields,
)
from baton.common.model_files.gguf.rope import rope_parameters
from baton.common.model_files.gguf.values import HeaderValues

__all__ = ["LATENT_ARCHITECTURES"]

_FUNCTION = "expert_gating_func"
_SOFTMAX, _SIGMOID = 1, 2  # the format's numbers of a router's function
_QUERY, _VALUE = "attention.key_length", "attention.value_length"
_TEMPERATURE = "rope.scaling.yarn_log_multiplier"
# Files have the factor of YaRN's logarithm, which is this share of config.json's number.
_SHARE = 0.1
_FLOAT32_DIGITS = 6  # of a number near one, which the file has in float32


def _deepseek(values: HeaderValues) -> Mapping[str, Any]:
    """Returns the fields of all models.

    Files with matrices of the absorbed form have widths of latent vectors where others have those
    of heads, which have keys of their own then.
    """
    rotary_dim = values.integer("rope.dimension_count")
    query_dim = values.integer(f"{_QUERY}_mla", values.integer(_QUERY))
    if query_dim <= rotary_dim:
        raise values.unsupported(_QUERY)
    rank = "attention.q_lora_rank"
    common = {
        **grouped_expert_fields(values),
        "num_key_value_heads": values.integer("attention.head_count"),
        "q_lora_rank": values.integer(rank) if values.has(rank) else None,
        "kv_lora_rank": values.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": query_dim - rotary_dim,
        "v_head_dim": values.integer(f"{_VALUE}_mla", values.integer(_VALUE)),
    }
    function = values.integer(_FUNCTION, _SOFTMAX)
    if function == _SIGMOID:
        return common
    if function != _SOFTMAX:
        raise values.unsupported(_FUNCTION)
    method = "greedy" if common["n_group"] == 1 else "group_limited_greedy"
    own = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": method,
    }
    return {**common, **own}


def _deepseek_rope(values: HeaderValues, rotary_dim: int) -> dict[str, Any]:
    """Returns the rotary embedding, with YaRN's temperature, which is that of `llama.cpp`."""
    rope = rope_parameters(values, rotary_dim, also_known=frozenset({_TEMPERATURE}))
    if rope["rope_type"] == "linear":
        raise values.unsupported("rope.scaling.type")
    if rope["rope_type"] == "yarn":
        temperature = round(values.number(_TEMPERATURE) / _SHARE, _FLOAT32_DIGITS)
        rope |= {"mscale": temperature, "mscale_all_dim": temperature}
    return rope


LATENT_ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "deepseek2": GgufArchitecture(
            model_class="DeepseekV3ForCausalLM",
            model_type="deepseek_v3",
            keys=GROUPED_EXPERT_KEYS
            | {
                "attention.q_lora_rank",
                "attention.kv_lora_rank",
                f"{_QUERY}_mla",
                f"{_VALUE}_mla",
            },
            fields=_deepseek,
            names={
                **GROUPED_EXPERT_NAMES,
                "attn_q_a": "self_attn.q_a_proj",
                "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj",
                "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                "attn_kv_b": "self_attn.kv_b_proj",
                "attn_k_b": "self_attn.k_b_proj",
                "attn_v_b": "self_attn.v_b_proj",
            },
            rope=_deepseek_rope,
            is_latent=True,
        ),
    }
)
