"""`DecoderConfig`: Llama, and what other families of decoders change of it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

from typing_extensions import override

from engine.models.config import MAX_LAYERS, ModelConfig, common_fields
from engine.models.config_fields import ConfigFieldError, ConfigFields, unsupported
from engine.models.expert_config import ExpertsConfig
from engine.models.latent_config import LatentConfig
from engine.models.rope_config import RopeConfig, read_rope, read_ropes_by_type
from kernels.layer_kinds import Activation, NormKind

__all__ = [
    "DecoderConfig",
    "QkNorm",
    "decoder_config",
    "every_nth_full",
    "fields_of",
    "read_layer_types",
]

_GATE_ACTIVATIONS = (Activation.SILU, Activation.GELU, Activation.GELU_TANH)
_MLP_ACTIVATIONS = (*_GATE_ACTIVATIONS, Activation.RELU)
_LAYER_TYPES = ("sliding_attention", "full_attention", "attention")  # the last is an older name


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
        norm: kind of all norms; None for layer norms.
        norm_bias: whether layer norms have biases.
        is_parallel: whether attention and MLP read the same hidden states.
        shares_norm: whether they then have one norm, and not one each.
        norms_inputs: whether the inputs of attention and MLP are normalized.
        norms_outputs: whether their outputs are, before they are added to the hidden states.
        qk_norm: what the norms of Q and K span.
        norms_values: whether each head's values are normalized too, without a weight.
        values_are_keys: per layer, whether values are keys before their norm and rotation; empty if
            none are.
        gates_mlp: whether the MLP has a gate.
        activation: function of the MLP's gate, or of its inner layer if it has none.
        attention_scale: factor on attention scores; None for 1 / sqrt(head_dim).
        gates_outputs: whether attention's output is multiplied by a sigmoid of a gate, which the
            projection of Q has too.
        score_cap: attention scores s become `score_cap * tanh(s / score_cap)`; None for no cap.
        has_sinks: whether each head of queries has a score that takes part in its softmax, but
            no key and value.
        embedding_scale: factor on embeddings.
        rounds_embedding_scale: whether that factor is rounded to the type of the weights.
        residual_scale: factor on what attention and MLP add to the hidden states.
        joined: modules whose layers are one tensor in the checkpoint: qkv_proj, gate_up_proj.
        joins_by_head: whether the joined Q, K and V are stored KV head by KV head.
        experts: the mixtures of experts; None if all layers have an MLP.
        latent: latent attention, of all layers; None if they cache keys and values.
    """

    intermediate_size: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]
    rope_of: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    norm: NormKind | None = NormKind.ROUNDED
    norm_bias: bool = False
    is_parallel: bool = False
    shares_norm: bool = True
    norms_inputs: bool = True
    norms_outputs: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    norms_values: bool = False
    values_are_keys: tuple[bool, ...] = ()
    gates_mlp: bool = True
    activation: Activation = Activation.SILU
    attention_scale: float | None = None
    gates_outputs: bool = False
    score_cap: float | None = None
    has_sinks: bool = False
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    residual_scale: float = 1.0
    joined: frozenset[str] = frozenset()
    joins_by_head: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None

    @property
    @override
    def mlp_size(self) -> int:
        if self.experts is None:
            return self.intermediate_size
        has_mlp = not all(self.experts.is_sparse)
        return max(self.intermediate_size if has_mlp else 0, self.experts.shared_width)

    @property
    @override
    def mixer_size(self) -> int:
        return self.attention_size(has_gates=self.gates_outputs)

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
        return replace(
            self,
            experts=None if self.experts is None else self.experts.stored_as(names),
            latent=None if self.latent is None else self.latent.stored_as(names),
        )


def decoder_config(
    fields: ConfigFields,
    *,
    layer_types: Sequence[str] | None = None,
    thetas: Mapping[str, float] | None = None,
    head_dims: Mapping[str, int] | None = None,
    is_interleaved: bool = False,
    recurrent_type: str | None = None,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    gates_mlp: bool = True,
) -> DecoderConfig:
    """Reads the fields that decoders have in common; those that differ are as Llama's.

    A field that some families lack counts only if it is a key of the family's defaults:
    `attention_bias` (of Q, K, V and the projection after attention), `mlp_bias`, `sliding_window`,
    `use_sliding_window`, `max_window_layers`, `num_key_value_heads`, `head_dim`, `layer_norm_eps`
    in place of `rms_norm_eps`, and `hidden_activation` in place of `hidden_act`.

    Args:
        fields: of config.json.
        layer_types: of each layer, if config.json has none; None for the family's usual ones.
        thetas: by layer type, the default base of its rotary embedding; None if all layers have
            the same embedding.
        head_dims: by layer type, the width of a head; None if all layers have the same.
        is_interleaved: whether rotary embedding pairs neighbouring elements.
        recurrent_type: the layer type of the family's recurrent layers; None if it has none.
        head_dim: width of a head; None for the one that config.json describes.
        num_kv_heads: number of KV heads; None for `num_key_value_heads`.
        gates_mlp: whether the MLP has a gate.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    attention_bias, mlp_bias = (
        fields.has(name) and fields.flag(name) for name in ("attention_bias", "mlp_bias")
    )
    common = common_fields(
        fields,
        num_kv_heads or _own_count(fields, "num_key_value_heads"),
        head_dim or _own_count(fields, "head_dim"),
    )
    types = read_layer_types(fields, layer_types, recurrent_type)
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
        ropes, rope_of = read_ropes_by_type(
            fields, head_dims or dict.fromkeys(types, common["head_dim"]), types, thetas
        )
    common["max_model_len"] = max(common["max_model_len"], *(rope.extended_len for rope in ropes))
    common["recurrent_layers"] = tuple(
        layer for layer, layer_type in enumerate(types) if layer_type == recurrent_type
    )
    if len(common["recurrent_layers"]) == len(types):
        raise ConfigFieldError("layer_types names no layer with attention; one is needed")
    return DecoderConfig(
        **common,
        intermediate_size=fields.count("intermediate_size"),
        rms_norm_eps=fields.epsilon(
            "layer_norm_eps" if fields.has("layer_norm_eps") else "rms_norm_eps"
        ),
        ropes=ropes,
        rope_of=rope_of,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        activation=fields.activation(
            "hidden_activation" if fields.has("hidden_activation") else "hidden_act",
            _GATE_ACTIVATIONS if gates_mlp else _MLP_ACTIVATIONS,
        ),
        gates_mlp=gates_mlp,
    )


def _own_count(fields: ConfigFields, name: str) -> int | None:
    """Returns a count that the family reads and config.json states; else None."""
    return fields.optional_count(name) if fields.has(name) else None


def read_layer_types(
    fields: ConfigFields, default: Sequence[str] | None, recurrent_type: str | None = None
) -> Sequence[str]:
    """Reads the type of each layer; the arguments are those of `decoder_config`."""
    num_layers = fields.count("num_hidden_layers", MAX_LAYERS)
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


def every_nth_full(
    fields: ConfigFields, interval: int, other: str = "sliding_attention"
) -> list[str]:
    """Returns layer types: every `interval`-th is "full_attention", the others are `other`."""
    num_layers = fields.count("num_hidden_layers", MAX_LAYERS)
    return [other if number % interval else "full_attention" for number in range(1, num_layers + 1)]


def fields_of(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of a config, of which a family's own config is made."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
