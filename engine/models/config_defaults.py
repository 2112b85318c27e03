"""The defaults of config.json by `model_type`, and older names of its fields.

Both are those of `transformers` 5. A family reads only the fields that its table has.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["DECODER", "DEFAULTS", "OTHER_NAMES"]

DECODER: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN = DECODER | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_OLMO = DECODER | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False}

_COHERE = DECODER | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
_GEMMA = DECODER | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

# Decoders with layer norms, MLPs without gates, and as many KV heads as heads.
_LAYER_NORMED = {
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_QWEN_DELTA = DECODER | {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": DECODER | _BIASES,
        "mistral": DECODER
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        "qwen2": _QWEN,
        "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
        "smollm3": DECODER
        | _BIASES
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
        },
        "phi3": DECODER
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
        "cohere": _COHERE | {"rope_theta": 500_000.0},
        "cohere2": _COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
        "gemma2": _GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        "gemma4_text": _GEMMA
        | {
            "vocab_size": 262144,
            "num_hidden_layers": 30,
            "max_position_embeddings": 131072,
            "sliding_window": 512,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": None,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                },
            },
        },
        "gemma3_text": _GEMMA
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        "granite": DECODER
        | _BIASES
        | {
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        "glm4": DECODER
        | {
            "vocab_size": 151552,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
        },
        "ernie4_5": DECODER
        | {
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        "seed_oss": DECODER
        | {
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        "gpt_neox": _LAYER_NORMED
        | {
            "vocab_size": 50432,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "partial_rotary_factor": 0.25,
            "attention_bias": True,
            "use_parallel_residual": True,
        },
        "falcon": _LAYER_NORMED
        | {
            "vocab_size": 65024,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "tie_word_embeddings": True,
            "alibi": False,
            "bias": False,
            "ffn_hidden_size": None,
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_kv_heads": None,
            "num_ln_in_parallel_attn": None,
            "parallel_attn": True,
        },
        "olmo2": _OLMO,
        "olmo3": _OLMO | {"rope_theta": 500_000.0, "sliding_window": 4096},
        "qwen3_5_text": _QWEN_DELTA
        | {
            "vocab_size": 248320,
            "intermediate_size": 12288,
            "num_key_value_heads": 4,
        },
        "qwen3_next": _QWEN_DELTA
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
        },
        "qwen3_5_moe_text": _QWEN_DELTA
        | {
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        "lfm2": DECODER
        | {
            "vocab_size": 65536,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
            "tie_embedding": True,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_ff_dim": None,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "full_attn_idxs": None,
        },
        "opt": {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
        "gpt2": {
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "n_inner": None,
            "max_position_embeddings": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
    }
)
OTHER_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        "falcon": {
            "hidden_act": "activation",
            "hidden_size": "n_embed",
            "layer_norm_eps": "layer_norm_epsilon",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        "gpt_neox": {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        "gpt_oss": {"num_local_experts": "num_experts"},
        "mixtral": {"num_local_experts": "num_experts"},
        "qwen3_moe": {"num_experts": "num_local_experts"},
    }
)
