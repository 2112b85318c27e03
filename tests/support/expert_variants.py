"""Variants of checkpoints with mixtures of experts; see `tests.support.checkpoints`.

Numbers of experts are odd, so that ranks have unequal shares, and widths do not fill panels.
"""

from typing import Any

__all__ = ["EXPERT_VARIANTS", "LATENT_VARIANTS"]

_SMALL: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

# variant -> (family, overrides of the family's config)
EXPERT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {**_SMALL, "head_dim": 16, "norm_topk_prob": True}),
    # Layers with an MLP beside layers with experts; each token uses all of these.
    "qwen3_moe_mixed": (
        "qwen3_moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 33,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "qwen2_moe": ("qwen2_moe", {**_SMALL, "shared_expert_intermediate_size": 48}),
    "olmoe": (
        "olmoe",
        {"num_experts": 5, "num_experts_per_tok": 4, "intermediate_size": 24},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    # Groups of three experts, of which a token chooses two; a layer with an MLP first.
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 9,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
            "head_dim": 24,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 7, "num_experts_per_tok": 1, "sliding_window": 11},
    ),
}

_DEEPSEEK: dict[str, Any] = {"num_key_value_heads": 4, "moe_intermediate_size": 24}
_GROUPS: dict[str, Any] = {
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}

LATENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_DEEPSEEK,
            **_GROUPS,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 10,
            "v_head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "mscale": 0.7,
                "mscale_all_dim": 0.5,
            },
        },
    ),
    "deepseek_v2_lite": (
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 18,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 14,
            "v_head_dim": 7,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            **_GROUPS,
            "n_shared_experts": 2,
            "q_lora_rank": 27,
            "kv_lora_rank": 40,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 16,
            "v_head_dim": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    # Pairs of elements half a head apart; a layer with an MLP between those with experts.
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **_DEEPSEEK,
            "n_routed_experts": 7,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_interleave": False,
            "rms_norm_eps": 1e-3,
            "q_lora_rank": 16,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 8,
            "v_head_dim": 24,
        },
    ),
}
"""Models with latent attention, and with experts beside it."""
