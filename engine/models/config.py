"""Frozen dataclasses for the model that a checkpoint's config.json describes.

`transformers` parses and completes the file; these classes keep the fields that
the model code needs, under one set of names. Reading raises an error that names
the field if Baton does not support its value.
"""

from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigurationError

__all__ = [
    "DecoderConfig",
    "Gpt2Config",
    "ModelConfig",
    "OptConfig",
    "RopeConfig",
    "decoder_config",
    "gpt2_config",
    "opt_config",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The fields that all families have.

    `max_model_len` counts prompt and generated tokens together.
    `sliding_windows` has one entry per layer: the number of tokens a query sees,
    itself included, or None for all.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: the base `theta` and the scaling for long contexts.

    `rope_type` is default, linear, llama3 or yarn; fields that a type does not
    use keep their defaults. `original_len` is the context length before scaling.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    original_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Llama, Mistral, Qwen2 and Qwen3, which differ only in these fields."""

    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptConfig(ModelConfig):
    """OPT. `embedding_size` is the width of token embeddings, projected to `hidden_size`."""

    ffn_dim: int
    embedding_size: int
    activation: str
    norm_before: bool
    final_norm: bool
    norm_affine: bool
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Config(ModelConfig):
    """GPT-2. `attention_scales` has, per layer, the factor on attention scores."""

    inner_size: int
    activation: str
    layer_norm_eps: float
    attention_scales: tuple[float, ...]


def decoder_config(
    source: Any, *, qkv_bias: bool = False, qk_norm: bool = False, windowed: bool = False
) -> DecoderConfig:
    """Reads the config of a Llama-shaped model.

    Args:
        source: the `transformers` config.
        qkv_bias: whether the family always has biases on Q, K and V.
        qk_norm: whether the family normalizes Q and K per head.
        windowed: whether the family uses the config's `sliding_window`.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    if source.hidden_act != "silu":
        raise unsupported("hidden_act", source.hidden_act)
    rope = _rope_config(source)
    attention_bias = bool(getattr(source, "attention_bias", False))
    common = _common(source)
    if common["head_dim"] % 2:  # rotary embedding rotates pairs of elements
        raise unsupported("head_dim", common["head_dim"])
    common["sliding_windows"] = _sliding_windows(source, windowed=windowed)
    if rope.rope_type == "yarn":
        extended_len = int(rope.original_len * rope.factor)
        common["max_model_len"] = max(common["max_model_len"], extended_len)
    return DecoderConfig(
        **common,
        intermediate_size=source.intermediate_size,
        rms_norm_eps=source.rms_norm_eps,
        rope=rope,
        qkv_bias=qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(getattr(source, "mlp_bias", False)),
        qk_norm=qk_norm,
    )


def opt_config(source: Any) -> OptConfig:
    """Reads the config of an OPT model.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    return OptConfig(
        **_common(source),
        ffn_dim=source.ffn_dim,
        embedding_size=source.word_embed_proj_dim,
        activation=source.activation_function,
        norm_before=source.do_layer_norm_before,
        final_norm=source.do_layer_norm_before and not source._remove_final_layer_norm,
        norm_affine=source.layer_norm_elementwise_affine,
        bias=source.enable_bias,
    )


def gpt2_config(source: Any) -> Gpt2Config:
    """Reads the config of a GPT-2 model.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    if source.add_cross_attention:
        raise unsupported("add_cross_attention", value=True)
    common = _common(source)
    scale = common["head_dim"] ** -0.5 if source.scale_attn_weights else 1.0
    by_layer = source.scale_attn_by_inverse_layer_idx
    return Gpt2Config(
        **common,
        inner_size=source.n_inner or 4 * source.hidden_size,
        activation=source.activation_function,
        layer_norm_eps=source.layer_norm_epsilon,
        attention_scales=tuple(
            scale / (layer + 1) if by_layer else scale for layer in range(source.num_hidden_layers)
        ),
    )


def unsupported(field: str, value: Any) -> ConfigurationError:
    """Returns the error for a config.json field with a value that Baton does not support."""
    return ConfigurationError(f"config.json: {field} {value!r} is not supported")


def _common(source: Any) -> dict[str, Any]:
    """Reads the fields of `ModelConfig`."""
    if getattr(source, "quantization_config", None) is not None:
        raise unsupported("quantization_config", source.quantization_config)
    num_heads = source.num_attention_heads
    num_kv_heads = getattr(source, "num_key_value_heads", None) or num_heads
    if num_heads % num_kv_heads:
        raise ConfigurationError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    return {
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "num_layers": source.num_hidden_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // num_heads,
        "max_model_len": source.max_position_embeddings,
        "tie_word_embeddings": source.tie_word_embeddings,
        "sliding_windows": (None,) * source.num_hidden_layers,
    }


# From config.json's names to RopeConfig's.
_ROPE_FIELDS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_len",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


def _rope_config(source: Any) -> RopeConfig:
    parameters = source.rope_parameters
    rope_type = parameters.get("rope_type")
    if rope_type not in ("default", "linear", "llama3", "yarn"):
        raise unsupported("rope_type", rope_type or "per layer type")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported("partial_rotary_factor", parameters["partial_rotary_factor"])
    if rope_type != "default" and parameters.get("factor") is None:
        raise ConfigurationError(f"config.json: rope_type {rope_type!r} needs a factor")
    given = {
        name: parameters[key]
        for key, name in _ROPE_FIELDS.items()
        if parameters.get(key) is not None
    }
    return RopeConfig(rope_type=rope_type, theta=parameters["rope_theta"], **given)


def _sliding_windows(source: Any, *, windowed: bool) -> tuple[int | None, ...]:
    window = source.sliding_window if windowed else None
    layer_types = getattr(source, "layer_types", None) or ["sliding_attention"] * (
        source.num_hidden_layers
    )
    for layer_type in layer_types:
        if layer_type not in ("sliding_attention", "full_attention"):
            raise unsupported("layer_types", layer_type)
    return tuple(
        window if layer_type == "sliding_attention" else None for layer_type in layer_types
    )
