"""Frozen dataclasses for the model that a checkpoint's config.json describes.

`ConfigFields` completes the file; these classes keep the fields that the model code
needs, under one set of names. Reading raises an error that names the field if Baton
does not support its value.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self

from typing_extensions import override

from engine.models.config_fields import (
    MAX_TOKENS,
    ConfigFieldError,
    ConfigFields,
    unsupported,
)
from engine.models.expert_config import ExpertsConfig
from engine.models.rope_config import RopeConfig, read_rope, read_ropes_by_type
from kernels.layer_kinds import Activation, NormKind

__all__ = [
    "DecoderConfig",
    "Gpt2Config",
    "ModelConfig",
    "OptConfig",
    "QkNorm",
    "StateShape",
    "decoder_config",
    "gpt2_config",
    "opt_config",
]

_GATE_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
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
    Logits x become `logit_cap * tanh(x / logit_cap)`, after they were multiplied by `logit_scale`.
    `names` has the checkpoint's names of the modules that the model names otherwise; each is one
    component of a tensor's name, or several.
    `recurrent_layers` has the numbers of the layers that keep a state in place of K and V, in
    ascending order.
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
    logit_scale: float = 1.0
    logit_cap: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    recurrent_layers: tuple[int, ...] = ()

    @property
    def state_shapes(self) -> tuple["StateShape", ...]:
        """The parts of a recurrent layer's state, in the order of `LayerState.parts`."""
        return ()

    @property
    @abstractmethod
    def mlp_size(self) -> int:
        """Width of the layers' MLP between its projections."""

    @property
    def num_unused_weights(self) -> int:
        """Number of the model's weights that a token does not use: of experts it did not choose."""
        return 0

    def workspace_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Returns the size of what a layer keeps beside its hidden states, Q, K, V and its MLP.

        Args:
            num_tokens: number of tokens of the step.
            itemsize: bytes of an element.
        """
        return 0

    @property
    def kv_variant(self) -> str:
        """Text that tells apart KV that models of one checkpoint compute in different ways."""
        return ""

    def limited_to(self, max_model_len: int) -> Self:
        """Returns the config of the model if it serves sequences of at most that many tokens."""
        return self

    def stored_as(self, names: Collection[str]) -> Self:
        """Returns the config of the model if the checkpoint has tensors of these names."""
        return self


@dataclass(frozen=True, slots=True)
class StateShape:
    """One part of a recurrent layer's state, `[num_heads, width]`.

    Attributes:
        name: of the part.
        num_heads: heads, which ranks divide. Layers whose channels do not depend on each other
            count each channel as one.
        width: elements of one head.
        dtype: the torch name of the element type; None for the type of the weights.
    """

    name: str
    num_heads: int
    width: int
    dtype: str | None = None


class QkNorm(Enum):
    """The elements over which Q and K are normalized."""

    NONE = "none"
    HEAD = "head"
    """Each head for itself (Qwen3)."""
    PROJECTION = "projection"
    """All heads together, before they are told apart (OLMo 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Llama and the families that differ from it only in these fields; the defaults are Llama's.

    Attributes:
        intermediate_size: width of the MLP.
        rms_norm_eps: of all norms.
        ropes: the different rotary embeddings.
        rope_of: per layer, the index of its embedding in `ropes`; None for no rotation.
        qkv_bias: whether Q, K and V have biases.
        output_bias: whether the projection after attention has one.
        mlp_bias: whether the projections of the MLP have biases.
        norm: kind of all norms.
        norms_inputs: whether the inputs of attention and MLP are normalized.
        norms_outputs: whether their outputs are, before they are added to the hidden states.
        qk_norm: what the norms of Q and K span.
        activation: function of the MLP's gate.
        attention_scale: factor on attention scores; None for 1 / sqrt(head_dim).
        score_cap: attention scores s become `score_cap * tanh(s / score_cap)`; None for no cap.
        embedding_scale: factor on embeddings.
        rounds_embedding_scale: whether that factor is rounded to the type of the weights.
        residual_scale: factor on what attention and MLP add to the hidden states.
        joined: modules whose layers are one tensor in the checkpoint: qkv_proj, gate_up_proj.
        experts: the mixtures of experts; None if all layers have an MLP.
    """

    intermediate_size: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]
    rope_of: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    norm: NormKind = NormKind.ROUNDED
    norms_inputs: bool = True
    norms_outputs: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    activation: Activation = Activation.SILU
    attention_scale: float | None = None
    score_cap: float | None = None
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    residual_scale: float = 1.0
    joined: frozenset[str] = frozenset()
    experts: ExpertsConfig | None = None

    @property
    @override
    def mlp_size(self) -> int:
        shared_width = 0 if self.experts is None else self.experts.shared_width
        return max(self.intermediate_size, shared_width)

    @property
    @override
    def num_unused_weights(self) -> int:
        return 0 if self.experts is None else self.experts.num_unused(self.hidden_size)

    @override
    def workspace_bytes(self, num_tokens: int, itemsize: int) -> int:
        if self.experts is None:
            return 0
        return self.experts.workspace_bytes(self.hidden_size, num_tokens, itemsize)

    @property
    @override
    def kv_variant(self) -> str:
        return "long" if any(rope.is_long for rope in self.ropes) else ""

    @override
    def limited_to(self, max_model_len: int) -> Self:
        ropes = (replace(rope, max_len=min(rope.max_len, max_model_len)) for rope in self.ropes)
        return replace(self, ropes=tuple(ropes))

    @override
    def stored_as(self, names: Collection[str]) -> Self:
        if self.experts is None:
            return self
        return replace(self, experts=self.experts.stored_as(names))


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
    layer_types: Sequence[str] | None = None,
    thetas: Mapping[str, float] | None = None,
    is_interleaved: bool = False,
    recurrent_type: str | None = None,
) -> DecoderConfig:
    """Reads the fields that decoders have in common; those that differ are as Llama's.

    Args:
        fields: of config.json.
        layer_types: of each layer, if config.json has none; None for the family's usual ones.
        thetas: by layer type, the default base of its rotary embedding; None if all layers have
            the same embedding.
        is_interleaved: whether rotary embedding pairs neighbouring elements.
        recurrent_type: the layer type of the family's recurrent layers; None if it has none.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    attention_bias, mlp_bias = (
        fields.has(name) and fields.flag(name) for name in ("attention_bias", "mlp_bias")
    )
    common = _common(
        fields, fields.optional_count("num_key_value_heads"), fields.optional_count("head_dim")
    )
    types = _layer_types(fields, layer_types, recurrent_type)
    window = _window(fields)
    common["sliding_windows"] = tuple(
        window if layer_type == "sliding_attention" else None for layer_type in types
    )
    ropes: tuple[RopeConfig, ...]
    rope_of: tuple[int | None, ...]
    if thetas is None:
        ropes = (read_rope(fields, common["head_dim"], is_interleaved=is_interleaved),)
        rope_of = (0,) * len(types)
    else:
        ropes, rope_of = read_ropes_by_type(fields, common["head_dim"], types, thetas)
    common["max_model_len"] = max(common["max_model_len"], *(rope.extended_len for rope in ropes))
    common["recurrent_layers"] = tuple(
        layer for layer, layer_type in enumerate(types) if layer_type == recurrent_type
    )
    return DecoderConfig(
        **common,
        intermediate_size=fields.count("intermediate_size"),
        rms_norm_eps=fields.epsilon("rms_norm_eps"),
        ropes=ropes,
        rope_of=rope_of,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        activation=_gate_activation(fields),
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


def _gate_activation(fields: ConfigFields) -> Activation:
    name = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    stated = fields.text(name)
    if stated not in _GATE_ACTIVATIONS:
        raise unsupported(name, stated)
    return _GATE_ACTIVATIONS[stated]


def _layer_types(
    fields: ConfigFields, default: Sequence[str] | None, recurrent_type: str | None
) -> Sequence[str]:
    num_layers = fields.count("num_hidden_layers", _MAX_LAYERS)
    stated = fields.raw("layer_types")
    if stated is None:
        return default or _usual_layer_types(fields, num_layers)
    if not isinstance(stated, list) or len(stated) != num_layers:
        raise ConfigFieldError(f"layer_types must be a list of {num_layers}, one for each layer")
    for layer_type in stated:
        if layer_type not in _LAYER_TYPES and layer_type != recurrent_type:
            raise unsupported("layer_types", layer_type)
    return stated


def _usual_layer_types(fields: ConfigFields, num_layers: int) -> Sequence[str]:
    """Returns the layer types of families whose layers with a window come last, if any do."""
    first = 0 if fields.has("sliding_window") else num_layers
    if fields.has("max_window_layers"):
        first = min(max(fields.integer("max_window_layers"), 0), num_layers)
    return ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)


def _window(fields: ConfigFields) -> int | None:
    """Returns the window of layers that have one; None if the model uses none."""
    is_used = fields.has("sliding_window") and (
        not fields.has("use_sliding_window") or fields.flag("use_sliding_window")
    )
    return fields.optional_count("sliding_window") if is_used else None
