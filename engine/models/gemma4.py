"""Gemma 4, the text model: layers with K and V of different shapes, or those of earlier layers.

A mixture of experts stands beside the MLP and not in its place. Both have norms before and after,
and so has their sum. The router reads the hidden states, with a norm of its own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from typing_extensions import override

import kernels
from baton.common.errors import ConfigurationError
from engine.models.config_fields import ConfigFieldError, ConfigFields, unsupported, wrong
from engine.models.decoder import Decoder, DecoderAttention, GatedMlp, new_norm
from engine.models.decoder_config import (
    DecoderConfig,
    QkNorm,
    decoder_config,
    every_nth_full,
    fields_of,
    read_layer_types,
)
from engine.models.expert_config import ExpertsConfig, experts_config
from engine.models.experts import SparseMlp
from engine.models.layers import select_rows
from engine.models.linear import Embedding, Linear
from engine.models.norms import RmsNorm
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.models.tensor_parts import StoredModule, TensorPart, as_numbers
from kernels import Cut, NormKind, RankGroup, Rotation, RoutingRule, RowsOfWeight
from kernels.block_rows import BlockRows
from kernels.paged_kv import LayerKv
from kvstore.layout import KvShape

__all__ = ["Gemma4", "Gemma4Config", "gemma4_config"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NAMES = {
    "attention_post_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "dense_post_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
    "mixture.experts": "experts",
    "mixture.gate": "router.proj",
    "mixture.router_norm.weight": "router.scale",
    "mixture.expert_scales": "router.per_expert_scale",
}
# Checkpoints have these tensors also of layers that read the K and V of another one.
_KV_OF_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,4})\.self_attn\.(?:[kv]_proj|k_norm)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """The fields of Gemma 4 beside those of other decoders.

    Mixtures of experts are added to the layers' MLPs, not in their place.

    Attributes:
        per_layer_width: width of the vector of each token that each layer adds; 0 for none.
        per_layer_vocab_size: number of tokens that have such a vector, at least `vocab_size`.
        has_wide_mlps: whether layers that read the K and V of another have an MLP of twice the
            width.
    """

    per_layer_width: int
    per_layer_vocab_size: int
    has_wide_mlps: bool

    @property
    @override
    def num_unused_weights(self) -> int:
        num_tables = self.num_layers * self.per_layer_width
        unread = num_tables * (self.per_layer_vocab_size - 1)  # a token reads one row
        return unread + (0 if self.experts is None else self.experts.num_unused(self.hidden_size))

    @property
    @override
    def mlp_size(self) -> int:
        return self.intermediate_size * (2 if self.has_wide_mlps else 1)

    def of_layer(self, number: int) -> Self:
        """Returns the config with the sizes of one layer."""
        shape = self.kv_shapes[number]
        factor = 2 if self.has_wide_mlps and self.reads_other(number) else 1
        return replace(
            self,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=factor * self.intermediate_size,
        )


def gemma4_config(fields: ConfigFields) -> Gemma4Config:
    """Reads the config of a Gemma 4 text model.

    Raises:
        ConfigurationError: a field has an unsupported value.
    """
    bidirectional = fields.value("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):  # this one concerns images alone
        raise unsupported("use_bidirectional_attention", bidirectional)
    types = read_layer_types(fields, [*every_nth_full(fields, 6)[:-1], _FULL])
    if types[-1] != _FULL:
        raise ConfigFieldError(f"layer_types ends with {types[-1]!r}; it must end with {_FULL!r}")
    shapes = _shapes(fields, types)
    config = decoder_config(
        fields,
        layer_types=types,
        thetas={_FULL: 1e6, _SLIDING: 1e4},
        head_dims={name: shape.head_dim for name, shape in zip(types, shapes, strict=True)},
    )
    keys_are_values = fields.flag("attention_k_eq_v")
    width = fields.value("hidden_size_per_layer_input") or 0
    if width and fields.count("vocab_size_per_layer_input") < config.vocab_size:
        limit = f"at least the {config.vocab_size} of vocab_size"
        name = "vocab_size_per_layer_input"
        raise wrong(name, fields.value(name), limit)
    return Gemma4Config(
        **fields_of(config)
        | {
            "norm": NormKind.WIDE,
            "norms_outputs": True,
            "qk_norm": QkNorm.HEAD,
            "norms_values": True,
            "values_are_keys": tuple(keys_are_values and name == _FULL for name in types),
            "attention_scale": 1.0,
            "embedding_scale": config.hidden_size**0.5,
            "rounds_embedding_scale": True,
            "logit_cap": fields.optional_number("final_logit_softcapping"),
            # Those of all layers, if all have the same.
            "num_kv_heads": shapes[0].num_kv_heads,
            "head_dim": shapes[0].head_dim,
            "kv_shapes": tuple(shapes),
            "kv_sources": _sources(fields, types),
            "experts": _experts(fields, config) if fields.flag("enable_moe_block") else None,
            "names": _NAMES,
        },
        per_layer_width=fields.count("hidden_size_per_layer_input") if width else 0,
        per_layer_vocab_size=fields.count("vocab_size_per_layer_input"),
        has_wide_mlps=fields.flag("use_double_wide_mlp"),
    )


def _experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig:
    """Reads the mixtures of experts, which all layers have."""
    experts = experts_config(
        fields,
        RoutingRule(1, normalizes=True, rounds=False),
        top_k_field="top_k_experts",
        activation=config.activation,
    )
    return replace(experts, router_eps=config.rms_norm_eps, has_expert_scales=True)


def _shapes(fields: ConfigFields, types: Sequence[str]) -> list[KvShape]:
    """Returns the shape of each layer's K and V.

    Layers without a window have sizes of their own, which config.json states once, or, as
    `transformers` 5 writes it, per layer.
    """
    num_kv_heads = fields.optional_count("num_key_value_heads") or fields.count(
        "num_attention_heads"
    )
    usual = {"num_key_value_heads": num_kv_heads, "head_dim": fields.count("head_dim")}
    stated = fields.raw("per_layer_config")
    if stated is None:
        full = {"head_dim": fields.count("global_head_dim")}
        if fields.flag("attention_k_eq_v") and fields.value("num_global_key_value_heads"):
            full["num_key_value_heads"] = fields.count("num_global_key_value_heads")
        stated = {str(number): full for number, name in enumerate(types) if name == _FULL}
    if not isinstance(stated, Mapping):
        raise wrong("per_layer_config", stated, "an object per layer")
    by_type: dict[str, KvShape] = {}
    shapes = []
    for number, name in enumerate(types):
        own = stated.get(str(number), {})
        if not isinstance(own, Mapping) or not set(own) <= set(usual):
            raise unsupported("per_layer_config", own)
        sizes = usual | dict(own)
        if not all(type(size) is int and size > 0 for size in sizes.values()):
            raise unsupported("per_layer_config", own)
        shape = KvShape(sizes["num_key_value_heads"], sizes["head_dim"])
        if by_type.setdefault(name, shape) != shape:
            raise ConfigFieldError(f"per_layer_config has different shapes for layers of {name}")
        shapes.append(shape)
    return shapes


def _sources(fields: ConfigFields, types: Sequence[str]) -> tuple[int, ...]:
    """Returns, per layer, the layer whose K and V it reads: the last ones read those of the last
    layer before them of the same type.
    """
    num_own = len(types) - fields.integer("num_kv_shared_layers")
    last = {name: number for number, name in enumerate(types[: max(num_own, 0)])}
    if not 0 < num_own <= len(types) or set(last) != set(types):
        raise unsupported("num_kv_shared_layers", fields.value("num_kv_shared_layers"))
    return tuple(number if number < num_own else last[name] for number, name in enumerate(types))


class Gemma4(Decoder):
    """A Gemma 4 text model.

    Raises:
        ConfigurationError: it cannot be divided among that many ranks or stages.
    """

    config: Gemma4Config

    def __init__(self, config: Gemma4Config, part: ModelPart = WHOLE_MODEL) -> None:
        shares = any(config.reads_other(number) for number in range(config.num_layers))
        if part.num_stages > 1 and (config.per_layer_width or shares):
            raise ConfigurationError(
                f"--pipeline-parallel-size is {part.num_stages}; it must be 1 for models whose "
                "layers share K and V or have embeddings of their own "
                "(num_kv_shared_layers, hidden_size_per_layer_input)"
            )
        num_ranks = 1 if part.ranks is None else part.ranks.size
        if any(shape.num_kv_heads % num_ranks for shape in config.kv_shapes):
            heads = sorted({shape.num_kv_heads for shape in config.kv_shapes})
            raise ConfigurationError(
                f"--tensor-parallel-size is {num_ranks}; it must divide the KV heads of all layers "
                f"({' and '.join(map(str, heads))})"
            )
        super().__init__(config, part)
        self._per_layer_width = width = config.per_layer_width
        if width:
            self.embed_tokens_per_layer = Embedding(
                config.per_layer_vocab_size,
                config.num_layers * width,
                is_head=False,
                ranks=part.ranks,
                scale=width**0.5,
                rounds_scale=True,
            )
            self.per_layer_model_projection = Linear(
                config.hidden_size,
                config.num_layers * width,
                bias=False,
                scale=config.hidden_size**-0.5,
            )
            self.per_layer_projection_norm = RmsNorm(width, config.rms_norm_eps, NormKind.WIDE)

    @override
    def is_unused(self, name: str) -> bool:
        match = _KV_OF_LAYER.search(name)
        return match is not None and self.config.reads_other(int(match[1]))

    @override
    def _new_layer(self, config: Any, number: int) -> nn.Module:
        return _Layer(config, number, self.part.ranks)

    @override
    def _layer_inputs(
        self, inputs: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[Any, ...]:
        (rotations,) = super()._layer_inputs(inputs, hidden, positions)
        if not self._per_layer_width:
            return rotations, None
        shape = (-1, self._per_layer_width)
        projected = self.per_layer_model_projection(hidden).view(shape)
        embedded = self.embed_tokens_per_layer(inputs).view(shape)
        vectors = self.per_layer_projection_norm(projected, residual=embedded)
        return rotations, vectors.view(len(hidden), -1)


class _Layer(nn.Module):
    """One layer; the arguments are those of `DecoderLayer`."""

    def __init__(self, config: Gemma4Config, number: int, ranks: RankGroup | None) -> None:
        super().__init__()
        own = config.of_layer(number)
        self.input_layernorm = new_norm(config)
        self.self_attn = DecoderAttention(own, number, ranks)
        self.attention_post_norm = new_norm(config)
        self.post_attention_layernorm = new_norm(config)
        self.mlp = GatedMlp(own, ranks)
        self.mlp_post_norm = new_norm(config)
        self.mixture = None
        if config.experts is not None:
            self.mixture = SparseMlp(config.hidden_size, config.experts, ranks)
            self.dense_post_norm = new_norm(config)
            self.experts_norm = new_norm(config)
            self.experts_post_norm = new_norm(config)
        self.layer_scalar = _Factor(config.hidden_size)
        width = config.per_layer_width
        self._columns = slice(number * width, (number + 1) * width)
        self._activation = config.activation
        if width:
            self.per_layer_input_gate = Linear(config.hidden_size, width, bias=False)
            # Vectors are sums divided by sqrt(2), which is done here.
            scale = 0.5**0.5
            self.per_layer_projection = Linear(width, config.hidden_size, bias=False, scale=scale)
            self.post_per_layer_input_norm = new_norm(config)

    def forward(
        self,
        hidden: torch.Tensor,
        rotations: Sequence[Rotation],
        vectors: torch.Tensor | None,
        kv: LayerKv,
    ) -> torch.Tensor:
        """Computes `[num_tokens, hidden_size]`; returns the rows of the tokens in `kv.rows`.

        Args:
            hidden: the layer's input.
            rotations: those of `DecoderConfig.ropes`.
            vectors: `[num_tokens, num_layers * per_layer_width]`; None if the model has none.
            kv: the layer's KV cache.
        """
        attended = self.self_attn(self.input_layernorm(hidden), rotations, kv)
        hidden = self.attention_post_norm(attended, residual=select_rows(hidden, kv))
        output = self.mlp(self.post_attention_layernorm(hidden))
        if self.mixture is not None:
            mixed = self.mixture(self.experts_norm(hidden), unnormed=hidden)
            output = self.experts_post_norm(mixed, residual=self.dense_post_norm(output))
        hidden = self.mlp_post_norm(output, residual=hidden)
        if vectors is not None:
            own = select_rows(vectors[:, self._columns], kv)
            gated = kernels.gate_rows(own, self.per_layer_input_gate(hidden), self._activation)
            output = self.per_layer_projection(gated)
            hidden = self.post_per_layer_input_norm(output, residual=hidden)
        scaled: torch.Tensor = self.layer_scalar(hidden)
        return scaled


class _Factor(StoredModule):
    """A number that hidden states are multiplied by.

    Args:
        width: of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.empty(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiplies `[rows, width]`."""
        return kernels.gate_rows(hidden, self.factors.expand(len(hidden), -1), None)

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        yield TensorPart(path, _Repeated(self.factors), (Cut.whole(1),))


class _Repeated(RowsOfWeight):
    """A target that stores one number many times.

    Args:
        target: `[n]`.
    """

    def __init__(self, target: torch.Tensor) -> None:
        self.shape, self.nbytes = (1,), target.element_size()
        self._target = target

    @override
    def copy_(self, source: torch.Tensor | BlockRows) -> None:
        self._target.copy_(as_numbers(source))
