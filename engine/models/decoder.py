"""Llama, Mistral, Qwen2 and Qwen3: rotary positions, RMS norms, gated MLP.

The families differ only in fields of `DecoderConfig`: biases, norms on Q and K,
sliding windows, rotary scaling, tied embeddings.
"""

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from engine.models.config import DecoderConfig
from engine.models.layers import (
    CausalModel,
    HeadCuts,
    RmsNorm,
    cached_attention,
    select_rows,
)
from engine.models.linear import FusedLinear, GatedLinear, Linear, cut_of
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.models.rotary import RotaryEmbedding
from kernels import Cut, QkNorms, RankGroup, Rotation
from kernels.paged_kv import LayerKv

__all__ = ["Decoder", "DecoderAttention", "DecoderLayer", "GatedMlp"]


class Decoder(CausalModel):
    """A Llama-shaped model."""

    checkpoint_prefix = "model."

    def __init__(self, config: DecoderConfig, part: ModelPart = WHOLE_MODEL) -> None:
        super().__init__(config, config.hidden_size, part)
        self.embed_tokens = self._new_embedding(config.hidden_size)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)
        self.layers = self._new_layers(
            lambda number: DecoderLayer(config, config.sliding_windows[number], part.ranks)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps) if part.is_last else None

    @override
    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert self.embed_tokens is not None
        embedded: torch.Tensor = self.embed_tokens(token_ids)
        return embedded

    @override
    def _layer_inputs(self, positions: torch.Tensor) -> tuple[Any, ...]:
        return (self.rotary(positions),)

    @override
    def _normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.norm is not None
        normed: torch.Tensor = self.norm(hidden)
        return normed


class DecoderLayer(nn.Module):
    """One layer.

    Args:
        config: the model's shape.
        sliding_window: number of tokens a query sees, itself included; None for all.
        ranks: the ranks that share the layer; None for one.
    """

    def __init__(
        self, config: DecoderConfig, sliding_window: int | None, ranks: RankGroup | None
    ) -> None:
        super().__init__()
        self.input_layernorm: nn.Module = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DecoderAttention(config, sliding_window, ranks)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMlp(config, ranks)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, kv: LayerKv) -> torch.Tensor:
        """Computes `[num_tokens, hidden_size]`; returns the rows of the tokens in `kv.rows`."""
        hidden = self.self_attn(self.input_layernorm(hidden), rotation, kv, residual=hidden)
        output: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden), residual=hidden)
        return output


class DecoderAttention(nn.Module):
    """Attention with the projections before and after it; the arguments are the layer's."""

    def __init__(
        self, config: DecoderConfig, sliding_window: int | None, ranks: RankGroup | None
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.sliding_window = sliding_window
        heads = HeadCuts.of(config, ranks)
        query, kv = heads.query.times(config.head_dim), heads.kv.times(config.head_dim)
        self._outputs = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = self._new_projection(config.hidden_size, bias=config.qkv_bias)
        self.o_proj = Linear(query, config.hidden_size, bias=config.output_bias, ranks=ranks)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, kv: LayerKv, residual: torch.Tensor
    ) -> torch.Tensor:
        """Computes `[num_tokens, hidden_size]`; returns the rows of the tokens in `kv.rows`."""
        return self._attend(self.qkv_proj(hidden), rotation, kv, residual)

    def _new_projection(self, in_features: int | Cut, *, bias: bool) -> FusedLinear:
        return FusedLinear(in_features, self._outputs, bias=bias)

    def _attend(
        self, qkv: torch.Tensor, rotation: Rotation, kv: LayerKv, residual: torch.Tensor
    ) -> torch.Tensor:
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        num_kv_heads = kv.cache.shape[2]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        # each [num_tokens, its heads, head_dim]
        query, key, value = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        attended = cached_attention(
            query,
            key,
            value,
            kv,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            rotation=rotation,
            norms=self._norms(),
        )
        output: torch.Tensor = self.o_proj(attended, select_rows(residual, kv))
        return output

    def _norms(self) -> QkNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return QkNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class GatedMlp(nn.Module):
    """The gated MLP; the arguments are the layer's."""

    def __init__(self, config: DecoderConfig, ranks: RankGroup | None) -> None:
        super().__init__()
        size = cut_of(config.intermediate_size, ranks)
        self.gate_up_proj = GatedLinear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias, ranks=ranks)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Computes `[rows, hidden_size]` and adds `residual`."""
        output: torch.Tensor = self.down_proj(self.gate_up_proj(hidden), residual)
        return output
