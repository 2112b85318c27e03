"""Frozen dataclasses for the model that a checkpoint's config.json describes.

`ConfigFields` completes the file; these classes keep the fields that the model code
needs, under one set of names. Reading raises an error that names the field if Baton
does not support its value.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from engine.models.config_fields import (
    MAX_TOKENS,
    ConfigFieldError,
    ConfigFields,
    positive,
    unsupported,
)

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

_BIAS_FIELDS = ("attention_bias", "mlp_bias")
_GATE_ACTIVATIONS = ("silu", "swish")  # two names of one function
_LAYER_TYPES = ("sliding_attention", "full_attention", "attention")  # the last is an older name
# Modules are made for each layer, and angles for each pair of a head's elements, before the
# weights' shapes are compared.
_MAX_LAYERS = 1024
_MAX_HEAD_DIM = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ABC):
    """The fields that all families have.

    `max_model_len` counts prompt and generated tokens together.
    `sliding_windows` has one entry per layer: the number of tokens a query sees,
    itself included, or None for all.
    `names` has the checkpoint's names of the modules that the model names otherwise; each is one
    component of a tensor's name, or several.
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
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    @abstractmethod
    def mlp_size(self) -> int:
        """Width of the layers' MLP between its projections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: the base `theta` and the scaling for long contexts.

    `rope_type` is default, linear, llama3 or yarn; fields that a type does not
    use keep their defaults. `original_len` is the context length before scaling.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    original_len: float = 0.0
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

    @property
    @override
    def mlp_size(self) -> int:
        return self.intermediate_size


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

    @property
    @override
    def mlp_size(self) -> int:
        return self.ffn_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Config(ModelConfig):
    """GPT-2. `attention_scales` has, per layer, the factor on attention scores."""

    inner_size: int
    activation: str
    layer_norm_eps: float
    attention_scales: tuple[float, ...]

    @property
    @override
    def mlp_size(self) -> int:
        return self.inner_size


def decoder_config(
    fields: ConfigFields,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    bias_fields: Collection[str] = _BIAS_FIELDS,
    windows: str = "none",
) -> DecoderConfig:
    """Reads the config of a Llama-shaped model.

    Args:
        fields: of config.json.
        qkv_bias: whether the family always has biases on Q, K and V.
        qk_norm: whether the family normalizes Q and K per head.
        bias_fields: those of `attention_bias` and `mlp_bias` that the family reads; it has no such
            biases without them, whatever config.json says.
        windows: whether the family uses the config's `sliding_window`: "none", "always", or
            "optional", if `use_sliding_window` is set.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    if fields.text("hidden_act") not in _GATE_ACTIVATIONS:
        raise unsupported("hidden_act", fields.text("hidden_act"))
    rope = _rope_config(fields)
    attention_bias, mlp_bias = (
        name in bias_fields and fields.flag(name) for name in ("attention_bias", "mlp_bias")
    )
    common = _common(
        fields, fields.optional_count("num_key_value_heads"), fields.optional_count("head_dim")
    )
    if common["head_dim"] % 2:  # rotary embedding rotates pairs of elements
        raise unsupported("head_dim", common["head_dim"])
    common["max_model_len"] = max(common["max_model_len"], _extended_len(rope))
    common["sliding_windows"] = _sliding_windows(fields, windows)
    return DecoderConfig(
        **common,
        intermediate_size=fields.count("intermediate_size"),
        rms_norm_eps=fields.epsilon("rms_norm_eps"),
        rope=rope,
        qkv_bias=qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def opt_config(fields: ConfigFields) -> OptConfig:
    """Reads the config of an OPT model.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    norm_before = fields.flag("do_layer_norm_before")
    return OptConfig(
        **_common(fields),
        ffn_dim=fields.count("ffn_dim"),
        embedding_size=fields.optional_count("word_embed_proj_dim") or fields.count("hidden_size"),
        activation=fields.text("activation_function"),
        norm_before=norm_before,
        final_norm=norm_before and not fields.flag("_remove_final_layer_norm"),
        norm_affine=fields.flag("layer_norm_elementwise_affine"),
        bias=fields.flag("enable_bias"),
    )


def gpt2_config(fields: ConfigFields) -> Gpt2Config:
    """Reads the config of a GPT-2 model.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    if fields.flag("add_cross_attention"):
        raise unsupported("add_cross_attention", value=True)
    common = _common(fields)
    scale = common["head_dim"] ** -0.5 if fields.flag("scale_attn_weights") else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx")
    return Gpt2Config(
        **common,
        inner_size=fields.optional_count("n_inner") or 4 * common["hidden_size"],
        activation=fields.text("activation_function"),
        layer_norm_eps=fields.epsilon("layer_norm_epsilon"),
        attention_scales=tuple(
            scale / (layer + 1) if by_layer else scale for layer in range(common["num_layers"])
        ),
    )


def _common(
    fields: ConfigFields, num_kv_heads: int | None = None, head_dim: int | None = None
) -> dict[str, Any]:
    """Reads the fields of `ModelConfig`.

    Args:
        fields: of config.json.
        num_kv_heads: number of KV heads; None for as many as there are heads.
        head_dim: width of a head; None for the width of hidden states divided by their number.
    """
    quantization = fields.raw("quantization_config")
    if quantization is not None:
        raise unsupported("quantization_config", quantization)
    num_layers = fields.count("num_hidden_layers", _MAX_LAYERS)
    num_heads, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    if num_heads % (num_kv_heads or num_heads):
        raise ConfigFieldError(
            f"num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if head_dim is None and hidden_size % num_heads:
        raise ConfigFieldError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads}, and there is no head_dim"
        )
    head_dim = head_dim or hidden_size // num_heads
    if head_dim > _MAX_HEAD_DIM:
        raise ConfigFieldError(f"the width of a head is {head_dim}; at most {_MAX_HEAD_DIM}")
    return {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads or num_heads,
        "head_dim": head_dim,
        "max_model_len": fields.count("max_position_embeddings", MAX_TOKENS),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "sliding_windows": (None,) * num_layers,
    }


_NEEDED_BY_TYPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Numbers that config.json and RopeConfig name alike.
_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor")
# The same; zero means the default, as null does.
_YARN_NUMBERS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def _rope_config(fields: ConfigFields) -> RopeConfig:
    parameters = fields.rope_parameters()
    rope_type = parameters["rope_type"]
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise unsupported("rope_type", "per layer type")
    if not isinstance(rope_type, str) or rope_type not in _NEEDED_BY_TYPE:
        raise unsupported("rope_type", rope_type)
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise unsupported("partial_rotary_factor", parameters["partial_rotary_factor"])
    for name in _NEEDED_BY_TYPE[rope_type]:
        if parameters.get(name) is None:
            raise ConfigFieldError(f"rope_type {rope_type!r} needs {name}")
    rope = RopeConfig(
        rope_type=rope_type,
        theta=positive("rope_theta", parameters["rope_theta"]),
        **_scaling(parameters),
    )
    if rope_type == "yarn" and rope.theta == 1:  # all pairs of elements would turn alike
        raise unsupported("rope_theta", rope.theta)
    return rope


def _scaling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `RopeConfig` that the parameters state."""
    names = {name: name for name in (*_ROPE_NUMBERS, *_YARN_NUMBERS)}
    names["original_max_position_embeddings"] = "original_len"
    stated: dict[str, Any] = {
        own_name: positive(name, parameters[name])
        for name, own_name in names.items()
        if parameters.get(name) is not None and (parameters[name] or name not in _YARN_NUMBERS)
    }
    if "truncate" in parameters:
        stated["truncate"] = bool(parameters["truncate"])
    return stated


def _extended_len(rope: RopeConfig) -> int:
    """Returns the context length that YaRN extends to; 0 for other types.

    Raises:
        ConfigFieldError: it is too large for a number of tokens.
    """
    if rope.rope_type != "yarn":
        return 0
    extended_len = rope.original_len * rope.factor
    if extended_len > MAX_TOKENS:
        raise ConfigFieldError(
            f"factor {rope.factor} times original_max_position_embeddings {rope.original_len} is "
            f"more than {MAX_TOKENS} tokens"
        )
    return int(extended_len)


def _sliding_windows(fields: ConfigFields, windows: str) -> tuple[int | None, ...]:
    num_layers = fields.count("num_hidden_layers", _MAX_LAYERS)
    is_used = windows == "always" or (windows == "optional" and fields.flag("use_sliding_window"))
    window = fields.optional_count("sliding_window") if is_used else None
    layer_types = fields.raw("layer_types")
    if layer_types is None:
        first = max(fields.integer("max_window_layers"), 0) if windows == "optional" else 0
        return (None,) * min(first, num_layers) + (window,) * max(num_layers - first, 0)
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ConfigFieldError(f"layer_types must be a list of {num_layers}, one for each layer")
    for layer_type in layer_types:
        if layer_type not in _LAYER_TYPES:
            raise unsupported("layer_types", layer_type)
    return tuple(
        window if layer_type == "sliding_attention" else None for layer_type in layer_types
    )
