"""The defaults of config.json of mixtures of experts without recurrent layers; see
`config_defaults`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine.models.config_defaults import DECODER, DEFAULTS

__all__ = ["EXPERT_DEFAULTS"]

_LLAMA: dict[str, Any] = {**DEFAULTS["llama"]}
# The layers that have experts, and the weights of these.
_SPARSE_LAYERS = {"decoder_sparse_step": 1, "norm_topk_prob": False}

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
    _LLAMA
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
EXPERT_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2_moe": {**DEFAULTS["qwen2"]}
        | _SPARSE_LAYERS
        | {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
        "qwen3_moe": DECODER
        | _SPARSE_LAYERS
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        "olmoe": {**DEFAULTS["olmo2"]}
        | {
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_experts_per_tok": 8,
            "num_experts": 64,
        },
        "mixtral": DECODER
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        "gpt_oss": DECODER
        | {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "quantization_config": None,
        },
        "glm4_moe": _LLAMA
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
        "deepseek_v2": _LLAMA
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
