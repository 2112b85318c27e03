"""GGUF files of dense decoders: Llama, and what other architectures change of it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from baton.common.model_files.gguf.architecture import GgufArchitecture, pairs_of_heads
from baton.common.model_files.gguf.rope import long_rope_parameters, rope_parameters
from baton.common.model_files.gguf.values import WINDOW_KEYS, HeaderValues

__all__ = ["DENSE_ARCHITECTURES", "OLMO3"]


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
    activation = "gelu_pytorch_tanh"
    return {
        "hidden_act": activation,
        "hidden_activation": activation,
        "query_pre_attn_scalar": width // num_heads if is_largest else values.head_dim,
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


def _cohere(values: HeaderValues) -> Mapping[str, Any]:
    return {
        "layer_norm_eps": values.number(_LAYER_NORM_EPSILON),
        "logit_scale": values.number("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in values.header.tensors,
    }


def _cohere2(values: HeaderValues) -> Mapping[str, Any]:
    return {
        **_cohere(values),
        "sliding_window": values.sliding_window(),
        "layer_types": values.layer_types(period=4),
    }


def _ernie4_5(values: HeaderValues) -> Mapping[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in values.header.tensors}


def _seed_oss(values: HeaderValues) -> Mapping[str, Any]:
    return {"attention_out_bias": "blk.0.attn_output.bias" in values.header.tensors}


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
_LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"

DENSE_ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(
            model_class="LlamaForCausalLM", model_type="llama", orders=pairs_of_heads
        ),
        "qwen2": GgufArchitecture(model_class="Qwen2ForCausalLM", model_type="qwen2"),
        "qwen3": GgufArchitecture(model_class="Qwen3ForCausalLM", model_type="qwen3"),
        "gemma2": GgufArchitecture(
            model_class="Gemma2ForCausalLM",
            model_type="gemma2",
            keys=WINDOW_KEYS | {"attn_logit_softcapping", "final_logit_softcapping"},
            fields=_gemma2,
            names=_GEMMA_NAMES,
            norm_offset=1,
        ),
        "gemma3": GgufArchitecture(
            model_class="Gemma3ForCausalLM",
            model_type="gemma3_text",
            keys=WINDOW_KEYS | {"rope.freq_base_swa", "final_logit_softcapping"},
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
            orders=pairs_of_heads,
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
            orders=pairs_of_heads,
        ),
        "command-r": GgufArchitecture(
            model_class="CohereForCausalLM",
            model_type="cohere",
            keys=frozenset({"logit_scale"}),
            fields=_cohere,
            epsilon=_LAYER_NORM_EPSILON,
        ),
        "cohere2": GgufArchitecture(
            model_class="Cohere2ForCausalLM",
            model_type="cohere2",
            keys=WINDOW_KEYS | {"logit_scale"},
            fields=_cohere2,
            epsilon=_LAYER_NORM_EPSILON,
        ),
        "ernie4_5": GgufArchitecture(
            model_class="Ernie4_5ForCausalLM", model_type="ernie4_5", fields=_ernie4_5
        ),
        "seed_oss": GgufArchitecture(
            model_class="SeedOssForCausalLM",
            model_type="seed_oss",
            fields=_seed_oss,
            names={"post_attention_norm": "post_attention_layernorm"},
        ),
    }
)
OLMO3 = GgufArchitecture(
    model_class="Olmo3ForCausalLM",
    model_type="olmo3",
    keys=WINDOW_KEYS | {"rope.freq_base_swa"},
    fields=_olmo3,
    names=_OLMO2_NAMES,
    rope=_olmo3_rope,
)
"""OLMo 3, whose files state `olmo2`."""
