"""The defaults of config.json of DeepSeek and of families with its experts; see `config_defaults`.

Those of a decoder are Llama's.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine.models.config_defaults import DEFAULTS

__all__ = ["DEEPSEEK_DEFAULTS"]

_DECODER: dict[str, Any] = {**DEFAULTS["llama"]}

# Sigmoid scores, and layers without experts before those that have some.
_SIGMOID_EXPERTS = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = (
    _DECODER
    | _LATENT
    | _SIGMOID_EXPERTS
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
    }
)
DEEPSEEK_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "glm4_moe": _DECODER
        | _SIGMOID_EXPERTS
        | {
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,  # of all checkpoints; 96 heads do not divide the hidden size
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
        },
        "deepseek_v2": _DECODER
        | _LATENT
        | {
            "vocab_size": 102400,
            "n_group": None,
            "topk_group": None,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": None,
            "routed_scaling_factor": 1.0,
            "moe_layer_freq": 1,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
        },
        "deepseek_v3": _DEEPSEEK_V3,
        "glm4_moe_lite": _DEEPSEEK_V3
        | {
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 4,
            "n_routed_experts": 64,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
        },
    }
)
