"""GPT-2: learned positions, layer norms before each part, matrices stored transposed."""

import torch
from torch import nn
from typing_extensions import override

from engine.models.config import Gpt2Config
from engine.models.layers import (
    CausalModel,
    HeadCuts,
    cached_attention,
    select_rows,
)
from engine.models.linear import (
    PositionTable,
    TransposedFusedLinear,
    TransposedLinear,
    cut_of,
)
from engine.models.norms import LayerNorm
from engine.models.part import WHOLE_MODEL, ModelPart
from kernels import RankGroup
from kernels.paged_kv import LayerKv

__all__ = ["Gpt2"]


class Gpt2(CausalModel):
    """A GPT-2 model."""

    checkpoint_prefix = "transformer."
    embedding_name = "wte"
    layers_name = "h"

    def __init__(self, config: Gpt2Config, part: ModelPart = WHOLE_MODEL) -> None:
        super().__init__(config, config.hidden_size, part)
        size = config.hidden_size
        self.wte = self._new_embedding(size)
        self.wpe = PositionTable(config.max_model_len, size) if part.is_first else None
        self.h = self._new_layers(
            lambda number: _Layer(config, config.attention_scales[number], part.ranks)
        )
        self.ln_f = _layer_norm(config) if part.is_last else None

    @override
    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert self.wte is not None
        assert self.wpe is not None
        placed: torch.Tensor = self.wpe(positions, self.wte(token_ids))
        return placed

    @override
    def _normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.ln_f is not None
        normed: torch.Tensor = self.ln_f(hidden)
        return normed


class _Layer(nn.Module):
    def __init__(self, config: Gpt2Config, scale: float, ranks: RankGroup | None) -> None:
        super().__init__()
        self.ln_1 = _layer_norm(config)
        self.attn = _Attention(config, scale, ranks)
        self.ln_2 = _layer_norm(config)
        self.mlp = _Mlp(config, ranks)

    def forward(self, hidden: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        hidden = self.attn(self.ln_1(hidden), kv, residual=hidden)
        output: torch.Tensor = self.mlp(self.ln_2(hidden), residual=hidden)
        return output


class _Attention(nn.Module):
    def __init__(self, config: Gpt2Config, scale: float, ranks: RankGroup | None) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = config.head_dim
        self.scale = scale
        heads_cut = HeadCuts.of(config, ranks).query.times(config.head_dim)
        self.c_attn = TransposedFusedLinear(
            size, {"q": heads_cut, "k": heads_cut, "v": heads_cut}, bias=True
        )
        self.c_proj = TransposedLinear(heads_cut, size, bias=True, ranks=ranks)

    def forward(self, hidden: torch.Tensor, kv: LayerKv, residual: torch.Tensor) -> torch.Tensor:
        qkv = self.c_attn(hidden).unflatten(1, (3, -1, self.head_dim))
        query, key, value = qkv.unbind(1)  # each [num_tokens, num_heads, head_dim]
        attended = cached_attention(query, key, value, kv, scale=self.scale)
        output: torch.Tensor = self.c_proj(attended, select_rows(residual, kv))
        return output


class _Mlp(nn.Module):
    def __init__(self, config: Gpt2Config, ranks: RankGroup | None) -> None:
        super().__init__()
        inner = cut_of(config.inner_size, ranks)
        self.c_fc = TransposedLinear(
            config.hidden_size, inner, bias=True, activation=config.activation
        )
        self.c_proj = TransposedLinear(inner, config.hidden_size, bias=True, ranks=ranks)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.c_proj(self.c_fc(hidden), residual)
        return output


def _layer_norm(config: Gpt2Config) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.layer_norm_eps, has_bias=True)
