"""The architectures that GGUF files may state, and the config and tensors that follow from each.

Files have the values in which models of an architecture differ, and leave out what all of them
share; `llama.cpp` has the rest in its code, and so has this module. A checkpoint of `transformers`
has all of it in config.json.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from baton.common.model_files.gguf.architecture import GgufArchitecture
from baton.common.model_files.gguf.header import GgufHeader
from baton.common.model_files.gguf.rope import long_rope_parameters, rope_parameters
from baton.common.model_files.gguf.values import HeaderValues

__all__ = ["architecture_of"]


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Returns the architecture of a file with one whole language model.

    Raises:
        ConfigurationError: the file has something else, or the architecture is not supported.
    """
    if header.metadata.get("general.type", "model") != "model":
        raise header.refuse(f"general.type {header.metadata['general.type']!r} is not supported")
    name = str(header.metadata.get("general.architecture"))
    if name not in _ARCHITECTURES:
        raise header.refuse(
            f"general.architecture {name!r} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    for key, architecture in _VARIANTS.get(name, {}).items():
        if header.metadata.get(f"{name}.{key}"):
            return architecture
    return _ARCHITECTURES[name]


def _gemma2(values: HeaderValues) -> Mapping[str, Any]:
    return {
        **_gemma(values, num_layers_of_27b=46),
        "sliding_window": values.sliding_window(default=4096),
        "layer_types": values.layer_types(period=2),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
    }


def _gemma3(values: HeaderValues) -> Mapping[str, Any]:
    window = values.sliding_window()
    caps = "final_logit_softcapping"
    return {
        **_gemma(values, num_layers_of_27b=62),
        **({} if window is None else {"sliding_window": window}),
        "layer_types": values.layer_types(period=1 if window is None else 6),
        caps: values.number(caps) if values.has(caps) else None,
    }


def _gemma(values: HeaderValues, num_layers_of_27b: int) -> Mapping[str, Any]:
    """Returns the fields of Gemma 2 and 3; their largest models scale scores in another way."""
    num_heads, width = values.integer("attention.head_count"), values.integer("embedding_length")
    is_largest = values.num_layers == num_layers_of_27b
    head_dim = values.integer("attention.key_length", width // num_heads)
    activation = "gelu_pytorch_tanh"
    return {
        "hidden_act": activation,
        "hidden_activation": activation,
        "query_pre_attn_scalar": width // num_heads if is_largest else head_dim,
    }


def _phi3(values: HeaderValues) -> Mapping[str, Any]:
    window = values.sliding_window()
    original = values.integer(
        "rope.scaling.original_context_length", values.integer("context_length")
    )
    return {"original_max_position_embeddings": original, "sliding_window": window}


def _phi3_rope(values: HeaderValues, rotary_dim: int) -> dict[str, Any]:
    return long_rope_parameters(values, rotary_dim) or rope_parameters(values, rotary_dim)


def _granite(values: HeaderValues) -> Mapping[str, Any]:
    if not values.flag("rope.scaling.finetuned", default=True):  # it has no rotary embedding
        raise values.unsupported("rope.scaling.finetuned")
    num_heads, width = values.integer("attention.head_count"), values.integer("embedding_length")
    return {
        "attention_multiplier": values.number("attention.scale", (width // num_heads) ** -0.5),
        "embedding_multiplier": values.number("embedding_scale", 1.0),
        "residual_multiplier": values.number("residual_scale", 1.0),
        "logits_scaling": values.number("logit_scale", 1.0),
    }


def _olmo3(values: HeaderValues) -> Mapping[str, Any]:
    return {
        "sliding_window": values.sliding_window(),
        "layer_types": values.layer_types(period=4),
    }


def _smollm3(values: HeaderValues) -> Mapping[str, Any]:
    has_rope = [int((layer + 1) % 4 != 0) for layer in range(values.num_layers)]
    return {"no_rope_layers": has_rope, "use_sliding_window": False}


def _qwen_moe(values: HeaderValues) -> Mapping[str, Any]:
    return {
        **_experts(values),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _qwen2_moe(values: HeaderValues) -> Mapping[str, Any]:
    whole = values.integer("feed_forward_length")
    return {
        **_qwen_moe(values),
        "norm_topk_prob": values.flag("expert_weights_norm", default=False),
        "shared_expert_intermediate_size": values.integer(
            "expert_shared_feed_forward_length", whole
        ),
    }


def _qwen3_moe(values: HeaderValues) -> Mapping[str, Any]:
    norm = values.flag("expert_weights_norm", default=True)
    return {**_qwen_moe(values), "norm_topk_prob": norm}


def _mixtral(values: HeaderValues) -> Mapping[str, Any]:
    experts = _experts(values)
    return {**experts, "num_local_experts": experts["num_experts"], "sliding_window": None}


def _olmoe(values: HeaderValues) -> Mapping[str, Any]:
    norm = values.flag("expert_weights_norm", default=False)
    return {**_experts(values), "norm_topk_prob": norm, "clip_qkv": None}


def _lfm2(values: HeaderValues) -> Mapping[str, Any]:
    return {
        "norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "layer_types": [
            "full_attention" if num_kv_heads else "conv"
            for num_kv_heads in values.per_layer("attention.head_count_kv")
        ],
        "conv_L_cache": values.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in values.header.tensors),
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted width
    }


def _experts(values: HeaderValues) -> dict[str, Any]:
    return {
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
    }


def _gemma3_rope(values: HeaderValues, rotary_dim: int) -> dict[str, Any]:
    return _rope_by_layer_type(values, rotary_dim, sliding_theta=10_000.0)


def _olmo3_rope(values: HeaderValues, rotary_dim: int) -> dict[str, Any]:
    return _rope_by_layer_type(values, rotary_dim, values.number("rope.freq_base", 10_000.0))


def _rope_by_layer_type(
    values: HeaderValues, rotary_dim: int, sliding_theta: float
) -> dict[str, Any]:
    """Returns two rotary embeddings; that of layers with a window is not scaled.

    Args:
        values: keys of the architecture.
        rotary_dim: number of a head's elements that are rotated.
        sliding_theta: base in layers with a window, of files that do not state it.
    """
    theta = values.number("rope.freq_base_swa", sliding_theta)
    return {
        "full_attention": rope_parameters(values, rotary_dim),
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }


_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO2_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_EXPERT_KEYS = frozenset({"expert_count", "expert_used_count", "expert_weights_norm"})
_WINDOW_KEYS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})

_ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(
            model_class="LlamaForCausalLM", model_type="llama", has_pairs=True
        ),
        "qwen2": GgufArchitecture(model_class="Qwen2ForCausalLM", model_type="qwen2"),
        "qwen3": GgufArchitecture(model_class="Qwen3ForCausalLM", model_type="qwen3"),
        "gemma2": GgufArchitecture(
            model_class="Gemma2ForCausalLM",
            model_type="gemma2",
            keys=_WINDOW_KEYS | {"attn_logit_softcapping", "final_logit_softcapping"},
            fields=_gemma2,
            names=_GEMMA_NAMES,
            norm_offset=1,
        ),
        "gemma3": GgufArchitecture(
            model_class="Gemma3ForCausalLM",
            model_type="gemma3_text",
            keys=_WINDOW_KEYS | {"rope.freq_base_swa", "final_logit_softcapping"},
            fields=_gemma3,
            names=_GEMMA_NAMES,
            rope=_gemma3_rope,
            norm_offset=1,
        ),
        "phi3": GgufArchitecture(
            model_class="Phi3ForCausalLM",
            model_type="phi3",
            keys=frozenset({"attention.sliding_window"}),
            fields=_phi3,
            names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            rope=_phi3_rope,
            rotates_part=True,
        ),
        "granite": GgufArchitecture(
            model_class="GraniteForCausalLM",
            model_type="granite",
            keys=frozenset({"attention.scale", "embedding_scale", "logit_scale", "residual_scale"}),
            fields=_granite,
            has_pairs=True,
        ),
        "olmo2": GgufArchitecture(
            model_class="Olmo2ForCausalLM", model_type="olmo2", names=_OLMO2_NAMES
        ),
        "glm4": GgufArchitecture(
            model_class="Glm4ForCausalLM",
            model_type="glm4",
            names={
                "post_attention_norm": "post_self_attn_layernorm",
                "ffn_up": "mlp.gate_up_proj",
                "post_ffw_norm": "post_mlp_layernorm",
            },
            rotates_part=True,
        ),
        "smollm3": GgufArchitecture(
            model_class="SmolLM3ForCausalLM",
            model_type="smollm3",
            fields=_smollm3,
            has_pairs=True,
        ),
        "qwen2moe": GgufArchitecture(
            model_class="Qwen2MoeForCausalLM",
            model_type="qwen2_moe",
            keys=_EXPERT_KEYS | {"expert_feed_forward_length", "expert_shared_feed_forward_length"},
            fields=_qwen2_moe,
            names={
                **_EXPERT_NAMES,
                "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
                "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
                "ffn_up_shexp": "mlp.shared_expert.up_proj",
                "ffn_down_shexp": "mlp.shared_expert.down_proj",
            },
            new_axes={"ffn_gate_inp_shexp": 0},
        ),
        "qwen3moe": GgufArchitecture(
            model_class="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            keys=_EXPERT_KEYS | {"expert_feed_forward_length"},
            fields=_qwen3_moe,
            names=_EXPERT_NAMES,
        ),
        "lfm2": GgufArchitecture(
            model_class="Lfm2ForCausalLM",
            model_type="lfm2",
            keys=frozenset({"shortconv.l_cache"}),
            fields=_lfm2,
            names={
                "attn_norm": "operator_norm",
                "attn_output": "self_attn.out_proj",
                "attn_q_norm": "self_attn.q_layernorm",
                "attn_k_norm": "self_attn.k_layernorm",
                "shortconv.conv": "conv.conv",
                "shortconv.in_proj": "conv.in_proj",
                "shortconv.out_proj": "conv.out_proj",
                "ffn_norm": "ffn_norm",
                "ffn_gate": "feed_forward.w1",
                "ffn_up": "feed_forward.w3",
                "ffn_down": "feed_forward.w2",
            },
            final_norm="model.embedding_norm",
            mixes_layers=True,
            new_axes={"shortconv.conv": 1},
        ),
        "olmoe": GgufArchitecture(
            model_class="OlmoeForCausalLM",
            model_type="olmoe",
            keys=_EXPERT_KEYS,
            fields=_olmoe,
            names=_EXPERT_NAMES,
        ),
    }
)
# By architecture and key, what files with a value of the key have instead.
_VARIANTS: Mapping[str, Mapping[str, GgufArchitecture]] = MappingProxyType(
    {
        "llama": {
            "expert_count": GgufArchitecture(
                model_class="MixtralForCausalLM",
                model_type="mixtral",
                keys=_EXPERT_KEYS,
                fields=_mixtral,
                names={
                    "ffn_gate_inp": "block_sparse_moe.gate",
                    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
                    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
                    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
                },
                has_pairs=True,
            )
        },
        "olmo2": {
            "attention.sliding_window": GgufArchitecture(
                model_class="Olmo3ForCausalLM",
                model_type="olmo3",
                keys=_WINDOW_KEYS | {"rope.freq_base_swa"},
                fields=_olmo3,
                names=_OLMO2_NAMES,
                rope=_olmo3_rope,
            )
        },
    }
)
