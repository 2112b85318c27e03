"""Llama and families like it: rotary positions, RMS norms, gated MLP.

The families differ only in fields of `DecoderConfig`: biases, norms on Q and K,
sliding windows, rotary embeddings, factors, and the checkpoint's names and joined tensors.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

import kernels
from baton.common.errors import ConfigurationError
from engine.models.decoder_config import DecoderConfig, QkNorm
from engine.models.experts import SparseMlp
from engine.models.latent import LatentAttention
from engine.models.layers import (
    CausalModel,
    HeadCuts,
    cached_attention,
    select_rows,
)
from engine.models.linear import FusedLinear, GatedLinear, Linear, cut_of
from engine.models.norms import LayerNorm, RmsNorm
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.models.rotary import RotaryEmbedding
from engine.models.tensor_parts import (
    StoredModule,
    TensorPart,
    grouped_order,
    half_split_order,
)
from kernels import Activation, Cut, QkNorms, RankGroup, Rotation
from kernels.paged_kv import LayerKv

__all__ = ["Decoder", "DecoderAttention", "DecoderLayer", "GatedMlp", "new_mlp", "new_norm"]


class Decoder(CausalModel):
    """A Llama-shaped model."""

    checkpoint_prefix = "model."

    def __init__(self, config: DecoderConfig, part: ModelPart = WHOLE_MODEL) -> None:
        super().__init__(config, config.hidden_size, part)
        self.embed_tokens = self._new_embedding(
            config.hidden_size,
            scale=config.embedding_scale,
            rounds_scale=config.rounds_embedding_scale,
        )
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope) for rope in config.ropes)
        self.layers = self._new_layers(lambda number: self._new_layer(config, number))
        self.norm = new_norm(config) if part.is_last else None

    def _new_layer(self, config: Any, number: int) -> nn.Module:
        return DecoderLayer(config, number, self.part.ranks)

    @override
    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert self.embed_tokens is not None
        embedded: torch.Tensor = self.embed_tokens(token_ids)
        return embedded

    @override
    def _layer_inputs(
        self, inputs: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[Any, ...]:
        return (tuple(rotary(positions) for rotary in self.rotaries),)

    @override
    def _normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.norm is not None
        normed: torch.Tensor = self.norm(hidden)
        return normed


class DecoderLayer(nn.Module):
    """One layer.

    Args:
        config: the model's shape.
        number: number of the layer in the model.
        ranks: the ranks that share the layer; None for one.
    """

    def __init__(self, config: DecoderConfig, number: int, ranks: RankGroup | None) -> None:
        super().__init__()
        shares_norm = config.is_parallel and config.shares_norm
        has_second_norm = config.norms_inputs and not shares_norm
        self.input_layernorm = new_norm(config, is_used=config.norms_inputs)
        self.self_attn = new_attention(config, number, ranks)
        self.post_attention_layernorm = new_norm(config, is_used=has_second_norm)
        self.mlp = new_mlp(config, number, ranks)
        self._norms_outputs = config.norms_outputs
        self._is_parallel, self._shares_norm = config.is_parallel, shares_norm
        self.attention_post_norm = new_norm(config, is_used=config.norms_outputs)
        self.mlp_post_norm = new_norm(config, is_used=config.norms_outputs)

    def forward(
        self, hidden: torch.Tensor, rotations: Sequence[Rotation], kv: LayerKv
    ) -> torch.Tensor:
        """Computes `[num_tokens, hidden_size]`; returns the rows of the tokens in `kv.rows`.

        Args:
            hidden: the layer's input.
            rotations: those of `DecoderConfig.ropes`.
            kv: the layer's KV cache.
        """
        output: torch.Tensor
        if self._is_parallel:
            normed = self.input_layernorm(hidden)
            rows = select_rows(normed if self._shares_norm else hidden, kv)
            rows = self.post_attention_layernorm(rows)  # attention may reuse the memory of `hidden`
            hidden = self.self_attn(normed, rotations, kv, residual=hidden)
            output = self.mlp(rows, residual=hidden)
            return output
        if not self._norms_outputs:
            norms = self.input_layernorm, self.post_attention_layernorm
            hidden = self.self_attn(hidden, rotations, kv, residual=hidden, norm=norms[0])
            output = self.mlp(hidden, residual=hidden, norm=norms[1])
            return output
        attended = self.self_attn(hidden, rotations, kv, norm=self.input_layernorm)
        hidden = self.attention_post_norm(attended, residual=select_rows(hidden, kv))
        output = self.mlp(hidden, norm=self.post_attention_layernorm)
        output = self.mlp_post_norm(output, residual=hidden)
        return output


def new_attention(config: DecoderConfig, number: int, ranks: RankGroup | None) -> nn.Module:
    """Makes the attention of a layer, over keys and values or over latent vectors."""
    kind = DecoderAttention if config.latent is None else LatentAttention
    return kind(config, number, ranks)


def new_mlp(config: DecoderConfig, number: int, ranks: RankGroup | None) -> nn.Module:
    """Makes the MLP of a layer, which may be a mixture of experts."""
    if config.experts is not None and config.experts.is_sparse[number]:
        return SparseMlp(config.hidden_size, config.experts, ranks)
    return GatedMlp(config, ranks) if config.gates_mlp else PlainMlp(config, ranks)


def new_norm(config: DecoderConfig, *, is_used: bool = True) -> nn.Module:
    """Makes a norm of hidden states; one that changes nothing if the model has none there."""
    if not is_used:
        return nn.Identity()
    if config.norm is None:
        return LayerNorm(config.hidden_size, config.rms_norm_eps, has_bias=config.norm_bias)
    return RmsNorm(config.hidden_size, config.rms_norm_eps, config.norm)


class DecoderAttention(nn.Module):
    """Attention with the projections before and after it; the arguments are the layer's.

    A norm that it is called with is applied to the inputs.
    """

    def __init__(self, config: DecoderConfig, number: int, ranks: RankGroup | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.sliding_window = config.sliding_windows[number]
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.soft_cap = config.score_cap
        self._rope = config.rope_of[number]
        heads = HeadCuts.of(config, ranks)
        query, kv = heads.query.times(config.head_dim), heads.kv.times(config.head_dim)
        self._gates_outputs = config.gates_outputs
        gates = query.size if config.gates_outputs else 0
        reads_other = config.reads_other(number)
        self._values_are_keys = bool(config.values_are_keys) and config.values_are_keys[number]
        key_width = 0 if reads_other else kv.size
        self._widths = [query.size, gates, key_width, 0 if self._values_are_keys else key_width]
        self._outputs = {"q_proj": query.times(2) if gates else query}
        names = zip(("k_proj", "v_proj"), self._widths[2:], strict=True)
        self._outputs |= {name: kv for name, width in names if width}
        self._storage = _qkv_storage(config, self._rope, heads.query.size)
        if config.joins_by_head:
            self._outputs = {"heads": _by_head(config, ranks)}
            order = grouped_order(heads.kv.size, self._widths)
            self._storage = {"is_joined": True, "row_orders": {"heads": order}}
        self.qkv_proj = self._new_projection(config.hidden_size, bias=config.qkv_bias)
        self.o_proj = Linear(
            query,
            config.hidden_size,
            bias=config.output_bias,
            ranks=ranks,
            scale=config.residual_scale,
        )
        self.sinks = _Sinks(heads.query) if config.has_sinks else None
        self._qk_norm, self._norms_values = config.qk_norm, config.norms_values
        self.q_norm = self._new_norm(config, query, ranks)
        self.k_norm = None if reads_other else self._new_norm(config, kv, ranks)

    def forward(
        self,
        hidden: torch.Tensor,
        rotations: Sequence[Rotation],
        kv: LayerKv,
        residual: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> torch.Tensor:
        """Computes `[num_tokens, hidden_size]`; returns the rows of the tokens in `kv.rows`."""
        return self._attend(self.qkv_proj(hidden, norm=norm), rotations, kv, residual)

    def _new_projection(self, in_features: int | Cut, *, bias: bool) -> FusedLinear:
        return FusedLinear(in_features, self._outputs, bias=bias, **self._storage)

    def _attend(
        self,
        qkv: torch.Tensor,
        rotations: Sequence[Rotation],
        kv: LayerKv,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        query, gates, key, value = torch.split(qkv, self._widths, dim=1)
        if self._values_are_keys:
            value = key
        if self._qk_norm is QkNorm.PROJECTION:
            assert self.q_norm is not None
            assert self.k_norm is not None
            query, key = self.q_norm(query), self.k_norm(key)
        # each [num_tokens, its heads, head_dim]
        query, key, value = (
            part.view(len(part), part.shape[1] // self.head_dim, self.head_dim)
            for part in (query, key, value)
        )
        attended = cached_attention(
            query,
            key,
            value,
            kv,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks.scores,
            rotation=None if self._rope is None else rotations[self._rope],
            norms=self._norms(),
        )
        if self._gates_outputs:
            gates = select_rows(gates, kv)
            attended = kernels.gate_rows(attended, gates, Activation.SIGMOID)
        residual = None if residual is None else select_rows(residual, kv)
        output: torch.Tensor = self.o_proj(attended, residual)
        return output

    @staticmethod
    def _new_norm(config: DecoderConfig, heads: Cut, ranks: RankGroup | None) -> RmsNorm | None:
        if config.qk_norm is QkNorm.NONE:
            return None
        assert config.norm is not None, "no family has layer norms of Q and K"
        if config.qk_norm is QkNorm.HEAD:
            return RmsNorm(config.head_dim, config.rms_norm_eps, config.norm)
        return RmsNorm(heads, config.rms_norm_eps, config.norm, ranks)

    def _norms(self) -> QkNorms | None:
        if self._qk_norm is not QkNorm.HEAD:
            return None
        query_norm = self.q_norm
        assert query_norm is not None
        key_norm = self.k_norm or query_norm  # layers that read the keys of others norm none
        return QkNorms(
            query_norm.weight,
            key_norm.weight,
            query_norm.eps,
            query_norm.kind,
            norms_values=self._norms_values,
        )


class _Sinks(StoredModule):
    """A score without a key and a value, for the softmax of each head of queries.

    Args:
        heads: the heads of this rank.
    """

    def __init__(self, heads: Cut) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.empty(heads.size))
        self._heads = heads

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        yield TensorPart(path, self.scores, (self._heads,))


def _qkv_storage(config: DecoderConfig, rope: int | None, num_heads: int) -> dict[str, Any]:
    """Returns the arguments of `FusedLinear` that say how the checkpoint stores Q, K and V."""
    orders = {}
    if rope is not None and config.ropes[rope].is_interleaved:
        order = half_split_order(config.head_dim, config.ropes[rope].rotary_dim)
        orders = {"q_proj": order, "k_proj": order}
    if config.gates_outputs:  # the checkpoint has each head's gate behind its query
        assert not orders, "no family with gates has interleaved rotary embeddings"
        orders = {"q_proj": grouped_order(num_heads, [num_heads * config.head_dim] * 2)}
    return {"is_joined": "qkv_proj" in config.joined, "row_orders": orders}


def _by_head(config: DecoderConfig, ranks: RankGroup | None) -> Cut:
    """Returns this rank's rows of Q, K and V that are stored KV head by KV head.

    Raises:
        ConfigurationError: there are more ranks than KV heads.
    """
    if ranks is not None and config.num_kv_heads % ranks.size:
        raise ConfigurationError(
            f"--tensor-parallel-size is {ranks.size}; it must divide the model's "
            f"{config.num_kv_heads} KV heads"
        )
    rows_per_head = (config.num_heads // config.num_kv_heads + 2) * config.head_dim
    return cut_of(config.num_kv_heads, ranks).times(rows_per_head)


class GatedMlp(nn.Module):
    """The gated MLP; the arguments are the layer's, and a norm of the inputs."""

    def __init__(self, config: DecoderConfig, ranks: RankGroup | None) -> None:
        super().__init__()
        size = cut_of(config.intermediate_size, ranks)
        is_joined = "gate_up_proj" in config.joined
        self.gate_up_proj = GatedLinear(
            config.hidden_size, size, config.activation, bias=config.mlp_bias, is_joined=is_joined
        )
        self.down_proj = Linear(
            size,
            config.hidden_size,
            bias=config.mlp_bias,
            ranks=ranks,
            scale=config.residual_scale,
        )

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> torch.Tensor:
        """Computes `[rows, hidden_size]` and adds `residual`."""
        output: torch.Tensor = self.down_proj(self.gate_up_proj(hidden, norm), residual)
        return output


class PlainMlp(nn.Module):
    """The MLP without a gate; the arguments are those of `GatedMlp`."""

    def __init__(self, config: DecoderConfig, ranks: RankGroup | None) -> None:
        super().__init__()
        size, bias = cut_of(config.intermediate_size, ranks), config.mlp_bias
        self.up_proj = Linear(config.hidden_size, size, bias=bias, activation=config.activation)
        self.down_proj = Linear(
            size, config.hidden_size, bias=bias, ranks=ranks, scale=config.residual_scale
        )

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> torch.Tensor:
        """Computes `[rows, hidden_size]` and adds `residual`."""
        normed = hidden if norm is None else norm(hidden)
        output: torch.Tensor = self.down_proj(self.up_proj(normed), residual)
        return output
