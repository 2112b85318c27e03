"""Frozen dataclasses for the model that a checkpoint's config.json describes.

`ConfigFields` completes the file; these classes keep the fields that the model code
needs, under one set of names. Reading raises an error that names the field if Baton
does not support its value.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from typing_extensions import override

from engine.models.config_fields import (
    MAX_TOKENS,
    ConfigFieldError,
    ConfigFields,
    unsupported,
)
from engine.models.quantization import Scheme, SchemeKind, quantization_scheme
from kernels.layer_kinds import Activation
from kvstore.layout import KvShape

__all__ = [
    "MAX_LAYERS",
    "Gpt2Config",
    "ModelConfig",
    "OptConfig",
    "StateShape",
    "common_fields",
    "gpt2_config",
    "opt_config",
]

# Modules are made for each layer, and angles for each pair of a head's elements, before the
# weights' shapes are compared.
MAX_LAYERS = 1024
_MAX_HEAD_DIM = 2**16
_ACTIVATIONS = (Activation.RELU, Activation.GELU, Activation.GELU_TANH, Activation.SILU)


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
    `kv_shapes` has one entry per layer if their K and V differ, and is empty otherwise.
    `kv_sources` has, per layer, the number of the layer whose K and V it reads; it is empty if
    each layer reads its own.
    `quantization` says how the checkpoint's weights are quantized; None if they are not.
    `num_kv_parts` is 2 for K and V, and 1 for models that cache one latent vector per token, whose
    `num_kv_heads` is 1 and whose `head_dim` is that vector's width.
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
    num_kv_parts: int = 2
    kv_shapes: tuple[KvShape, ...] = ()
    kv_sources: tuple[int, ...] = ()
    quantization: Scheme | None = None

    def reads_other(self, number: int) -> bool:
        """Whether a layer reads the K and V of another one."""
        return bool(self.kv_sources) and self.kv_sources[number] != number

    @property
    def max_head_dim(self) -> int:
        """Width of the widest head."""
        return max([self.head_dim, *(shape.head_dim for shape in self.kv_shapes)])

    @property
    def state_shapes(self) -> tuple["StateShape", ...]:
        """The parts of a recurrent layer's state, in the order of `LayerState.parts`."""
        return ()

    @property
    @abstractmethod
    def mlp_size(self) -> int:
        """Width of the layers' MLP between its projections."""

    @property
    def mixer_size(self) -> int:
        """Elements of a token between the projections of the layers' widest part that mixes tokens:
        of all inputs and results together.
        """
        return self.attention_size()

    def attention_size(self, *, has_gates: bool = False) -> int:
        """Returns `mixer_size` of attention, whose output may be multiplied by gates."""
        num_parts = 5 if has_gates else 3  # as wide as Q
        return (num_parts * self.num_heads + 2 * self.num_kv_heads) * self.max_head_dim

    @property
    def num_unused_weights(self) -> int:
        """Number of the model's weights that a token does not use: of experts it did not choose."""
        return 0

    def workspace_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Returns the size of what a layer keeps beside its hidden states, its mixer and its MLP.

        Args:
            num_tokens: number of tokens of the step.
            itemsize: bytes of an element.
        """
        return 0

    @property
    def kv_variant(self) -> str:
        """Text that distinguishes KV that models of one checkpoint compute in different ways."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OptConfig(ModelConfig):
    """OPT. `embedding_size` is the width of token embeddings, projected to `hidden_size`."""

    ffn_dim: int
    embedding_size: int
    activation: Activation
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
    activation: Activation
    layer_norm_eps: float
    attention_scales: tuple[float, ...]

    @property
    @override
    def mlp_size(self) -> int:
        return self.inner_size


def opt_config(fields: ConfigFields) -> OptConfig:
    """Reads the config of an OPT model.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    norm_before = fields.flag("do_layer_norm_before")
    return OptConfig(
        **common_fields(fields),
        ffn_dim=fields.count("ffn_dim"),
        embedding_size=fields.optional_count("word_embed_proj_dim") or fields.count("hidden_size"),
        activation=fields.activation("activation_function", _ACTIVATIONS),
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
    common = common_fields(fields)
    if common["quantization"] is not None:  # some tools transpose its layers, some do not
        raise unsupported("quantization_config", fields.raw("quantization_config"))
    scale = common["head_dim"] ** -0.5 if fields.flag("scale_attn_weights") else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx")
    return Gpt2Config(
        **common,
        inner_size=fields.optional_count("n_inner") or 4 * common["hidden_size"],
        activation=fields.activation("activation_function", _ACTIVATIONS),
        layer_norm_eps=fields.epsilon("layer_norm_epsilon"),
        attention_scales=tuple(
            scale / (layer + 1) if by_layer else scale for layer in range(common["num_layers"])
        ),
    )


def common_fields(
    fields: ConfigFields, num_kv_heads: int | None = None, head_dim: int | None = None
) -> dict[str, Any]:
    """Reads the fields of `ModelConfig`.

    Args:
        fields: of config.json.
        num_kv_heads: number of KV heads; None for as many as there are heads.
        head_dim: width of a head; None for the width of hidden states divided by their number.
    """
    quantization = quantization_scheme(fields.raw("quantization_config"))
    has_mxfp4 = quantization is not None and quantization.kind is SchemeKind.MXFP4
    # Families read the field whose experts have 4-bit floats, and no others.
    if quantization is not None and has_mxfp4 != fields.has("quantization_config"):
        raise unsupported("quantization_config", fields.raw("quantization_config"))
    num_layers = fields.count("num_hidden_layers", MAX_LAYERS)
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
        "quantization": quantization,
    }
