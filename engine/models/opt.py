"""OPT (arXiv:2205.01068): learned positions, layer norms before or after, plain MLP."""

import torch
from torch import nn
from typing_extensions import override

from engine.models.config import OptConfig
from engine.models.layers import (
    CausalModel,
    HeadCuts,
    cached_attention,
    select_rows,
)
from engine.models.linear import FusedLinear, Linear, PositionTable, cut_of
from engine.models.norms import LayerNorm
from engine.models.part import WHOLE_MODEL, ModelPart
from kernels import RankGroup
from kernels.paged_kv import LayerKv

__all__ = ["Opt"]

_NORM_EPS = 1e-5
# OPT was trained with code in which the first two rows of the position table are for padding.
_NUM_PADDING_ROWS = 2


class Opt(CausalModel):
    """An OPT model."""

    checkpoint_prefix = "model.decoder."

    def __init__(self, config: OptConfig, part: ModelPart = WHOLE_MODEL) -> None:
        super().__init__(config, config.embedding_size, part)
        width, size = config.embedding_size, config.hidden_size
        self.embed_tokens = self._new_embedding(width)
        self.embed_positions = (
            PositionTable(config.max_model_len, size, _NUM_PADDING_ROWS) if part.is_first else None
        )
        reads, writes = part.is_first and width != size, part.is_last and width != size
        self.project_in = Linear(width, size, bias=False) if reads else nn.Identity()
        self.project_out = Linear(size, width, bias=False) if writes else nn.Identity()
        self.layers = self._new_layers(lambda _: _Layer(config, part.ranks))
        has_norm = part.is_last and config.final_norm
        self.final_layer_norm = _layer_norm(config) if has_norm else nn.Identity()

    @override
    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert self.embed_tokens is not None
        assert self.embed_positions is not None
        embedded = self.project_in(self.embed_tokens(token_ids))
        placed: torch.Tensor = self.embed_positions(positions, embedded)
        return placed

    @override
    def _normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.final_layer_norm(hidden)
        return normed

    @override
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().logits(self.project_out(hidden), out)


class _Layer(nn.Module):
    def __init__(self, config: OptConfig, ranks: RankGroup | None) -> None:
        super().__init__()
        self.norm_before = config.norm_before
        self.self_attn = _Attention(config, ranks)
        self.self_attn_layer_norm = _layer_norm(config)
        size, inner = config.hidden_size, cut_of(config.ffn_dim, ranks)
        self.fc1 = Linear(size, inner, bias=config.bias, activation=config.activation)
        self.fc2 = Linear(inner, size, bias=config.bias, ranks=ranks)
        self.final_layer_norm = _layer_norm(config)

    def forward(self, hidden: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        output: torch.Tensor
        if self.norm_before:
            hidden = self.self_attn(self.self_attn_layer_norm(hidden), kv, residual=hidden)
            output = self.fc2(self.fc1(self.final_layer_norm(hidden)), residual=hidden)
            return output
        hidden = self.self_attn_layer_norm(self.self_attn(hidden, kv, residual=hidden))
        output = self.final_layer_norm(self.fc2(self.fc1(hidden), residual=hidden))
        return output


class _Attention(nn.Module):
    def __init__(self, config: OptConfig, ranks: RankGroup | None) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = config.head_dim
        heads_cut = HeadCuts.of(config, ranks).query.times(config.head_dim)
        self.qkv_proj = FusedLinear(
            size, {"q_proj": heads_cut, "k_proj": heads_cut, "v_proj": heads_cut}, bias=config.bias
        )
        self.out_proj = Linear(heads_cut, size, bias=config.bias, ranks=ranks)

    def forward(self, hidden: torch.Tensor, kv: LayerKv, residual: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).unflatten(1, (3, -1, self.head_dim))
        query, key, value = qkv.unbind(1)  # each [num_tokens, num_heads, head_dim]
        scale = self.head_dim**-0.5
        attended = cached_attention(query, key, value, kv, scale=scale)
        output: torch.Tensor = self.out_proj(attended, select_rows(residual, kv))
        return output


def _layer_norm(config: OptConfig) -> LayerNorm:
    affine = config.norm_affine
    return LayerNorm(config.hidden_size, _NORM_EPS, has_weight=affine, has_bias=affine)
