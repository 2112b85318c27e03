"""GGUF files of mixtures of experts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from baton.common.model_files.gguf.architecture import GgufArchitecture, pairs_of_heads
from baton.common.model_files.gguf.rope import rope_parameters
from baton.common.model_files.gguf.values import WINDOW_KEYS, HeaderValues

__all__ = [
    "EXPERT_ARCHITECTURES",
    "MIXTRAL",
    "SHARED_EXPERT_KEYS",
    "SHARED_EXPERT_NAMES",
    "qwen_moe_fields",
    "shared_expert_fields",
]


def qwen_moe_fields(values: HeaderValues, *, normalizes: bool) -> dict[str, Any]:
    """Returns the fields of Qwen's mixtures.

    Args:
        values: keys of the architecture.
        normalizes: whether the weights of experts are, in files that do not state it.
    """
    return {
        **_experts(values),
        "moe_intermediate_size": values.integer(_WIDTH),
        "norm_topk_prob": values.flag("expert_weights_norm", default=normalizes),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def shared_expert_fields(values: HeaderValues) -> dict[str, Any]:
    """Returns the width of the expert that all tokens have."""
    width = values.integer("expert_shared_feed_forward_length", values.mlp_width)
    return {"shared_expert_intermediate_size": width}


def _qwen2_moe(values: HeaderValues) -> Mapping[str, Any]:
    return {**qwen_moe_fields(values, normalizes=False), **shared_expert_fields(values)}


def _qwen3_moe(values: HeaderValues) -> Mapping[str, Any]:
    return qwen_moe_fields(values, normalizes=True)


def _mixtral(values: HeaderValues) -> Mapping[str, Any]:
    experts = _experts(values)
    return {**experts, "num_local_experts": experts["num_experts"], "sliding_window": None}


def _olmoe(values: HeaderValues) -> Mapping[str, Any]:
    norm = values.flag("expert_weights_norm", default=False)
    return {**_experts(values), "norm_topk_prob": norm, "clip_qkv": None}


def _gpt_oss(values: HeaderValues) -> Mapping[str, Any]:
    experts = _experts(values)
    return {
        **experts,
        "num_local_experts": experts["num_experts"],
        "intermediate_size": values.integer(_WIDTH),
        "sliding_window": values.sliding_window(),
        "layer_types": values.layer_types(period=2),
    }


def _gpt_oss_rope(values: HeaderValues, rotary_dim: int) -> dict[str, Any]:
    rope = rope_parameters(values, rotary_dim)
    return {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope


def _glm4_moe(values: HeaderValues) -> Mapping[str, Any]:
    function = "expert_gating_func"
    if values.integer(function, _SIGMOID) != _SIGMOID:
        raise values.unsupported(function)
    dense = values.header.metadata.get(values.name(_NUM_DENSE), 0)
    if type(dense) is not int or not 0 <= dense <= values.num_layers:
        raise values.unsupported(_NUM_DENSE)
    return {
        "n_routed_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "n_shared_experts": values.integer("expert_shared_count"),
        "moe_intermediate_size": values.integer(_WIDTH),
        "first_k_dense_replace": dense,
        "n_group": values.integer("expert_group_count", 1),
        "topk_group": values.integer("expert_group_used_count", 1),
        "norm_topk_prob": values.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in values.header.tensors,
    }


def _experts(values: HeaderValues) -> dict[str, Any]:
    return {
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
    }


_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
SHARED_EXPERT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **_NAMES,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
"""Names of mixtures with an expert that all tokens have, as `GgufArchitecture.names`."""
_KEYS = frozenset({"expert_count", "expert_used_count", "expert_weights_norm"})
_WIDTH = "expert_feed_forward_length"
_NUM_DENSE = "leading_dense_block_count"
_SIGMOID = 2  # the format's number of a router's function
SHARED_EXPERT_KEYS = _KEYS | {_WIDTH, "expert_shared_feed_forward_length"}
"""Keys that `qwen_moe_fields` and `shared_expert_fields` read."""

EXPERT_ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "qwen2moe": GgufArchitecture(
            model_class="Qwen2MoeForCausalLM",
            model_type="qwen2_moe",
            keys=SHARED_EXPERT_KEYS,
            fields=_qwen2_moe,
            names=SHARED_EXPERT_NAMES,
            new_axes={"ffn_gate_inp_shexp": 0},
        ),
        "qwen3moe": GgufArchitecture(
            model_class="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            keys=_KEYS | {_WIDTH},
            fields=_qwen3_moe,
            names=_NAMES,
        ),
        "olmoe": GgufArchitecture(
            model_class="OlmoeForCausalLM",
            model_type="olmoe",
            keys=_KEYS,
            fields=_olmoe,
            names=_NAMES,
        ),
        "glm4moe": GgufArchitecture(
            model_class="Glm4MoeForCausalLM",
            model_type="glm4_moe",
            keys=_KEYS
            | {
                _WIDTH,
                _NUM_DENSE,
                "expert_gating_func",
                "expert_group_count",
                "expert_group_used_count",
                "expert_shared_count",
                "expert_weights_scale",
                "nextn_predict_layers",
            },
            fields=_glm4_moe,
            names={
                **_NAMES,
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
                "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
                "ffn_up_shexp": "mlp.shared_experts.up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
                "post_attention_norm": "post_attention_layernorm",
            },
            rotates_part=True,
        ),
        "gpt-oss": GgufArchitecture(
            model_class="GptOssForCausalLM",
            model_type="gpt_oss",
            keys=_KEYS | WINDOW_KEYS | {_WIDTH},
            fields=_gpt_oss,
            names={
                **_NAMES,
                "attn_sinks.weight": "self_attn.sinks",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.router",
            },
            rope=_gpt_oss_rope,
        ),
    }
)
MIXTRAL = GgufArchitecture(
    model_class="MixtralForCausalLM",
    model_type="mixtral",
    keys=_KEYS,
    fields=_mixtral,
    names={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    },
    orders=pairs_of_heads,
)
"""Mixtral, whose files state `llama`."""
