"""Heads that draft tokens from the served model's hidden states: EAGLE and Medusa.

EAGLE (arXiv:2401.15077) reads the served model's final states and uses its output head; EAGLE-3
(arXiv:2503.01840) reads the states of three layers and has an output head of its own, often for
a part of the vocabulary. Both read, at each position, a state and the embedding of the token after
it, and draft the token after that one. Their own state takes the place of the served model's where
that is not known yet.

Medusa (arXiv:2401.10774) has several heads, each of which drafts the token at one later place from
the served model's final state alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's usual name for it
from torch import nn
from typing_extensions import override

import kernels
from engine.models.decoder import DecoderAttention, DecoderLayer, GatedMlp
from engine.models.decoder_config import DecoderConfig
from engine.models.layers import CausalModel
from engine.models.linear import Embedding, Linear
from engine.models.norms import RmsNorm
from engine.models.rotary import RotaryEmbedding
from kernels import Cut, Rotation
from kernels.paged_kv import LayerKv

__all__ = ["Eagle3Head", "EagleHead", "MedusaConfig", "MedusaHeads"]


class _Head(CausalModel):
    """Base of both heads of EAGLE.

    `model(inputs, positions, kv)` takes `[num_tokens, 2 * hidden_size]` in place of token ids: per
    position the embedding of the next token, and a state. It returns the head's own states.
    """

    checkpoint_prefix = ""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.rotary = RotaryEmbedding(config.ropes[0])

    @property
    @override
    def word_embedding(self) -> Embedding | None:
        return None

    @override
    def _layer_inputs(
        self, inputs: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[Any, ...]:
        return ((self.rotary(positions),),)

    @override
    def _normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class EagleHead(_Head):
    """The head of EAGLE.

    Args:
        config: its shape, with one layer and tied embeddings.
        has_bias: whether its first projection has a bias.
        served_logits: `CausalModel.logits` of the served model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        has_bias: bool,
        served_logits: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    ) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = Linear(2 * size, size, bias=has_bias)
        layer = DecoderLayer(config, 0, None)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleDict({"0": layer})
        self._served_logits = served_logits

    @override
    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.fc(token_ids)
        return mixed

    @override
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._served_logits(hidden, out)


class Eagle3Head(_Head):
    """The head of EAGLE-3.

    Args:
        config: its shape, with one layer, untied embeddings and as many tokens as it can draft.
        norms_residual: whether the normalized state is also what the layer adds to.
    """

    def __init__(self, config: DecoderConfig, *, norms_residual: bool) -> None:
        super().__init__(config)
        self.fc = Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _MixingLayer(config, norms_residual=norms_residual)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def mix(self, states: torch.Tensor) -> torch.Tensor:
        """Maps the states of three layers side by side, `[n, 3 * hidden_size]`, to one each."""
        mixed: torch.Tensor = self.fc(states)
        return mixed

    @override
    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return token_ids

    @property
    @override
    def _numbered_layers(self) -> Iterable[tuple[str, nn.Module]]:
        return (("0", self.midlayer),)

    @override
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().logits(self.norm(hidden), out)


class _MixingLayer(nn.Module):
    """A layer whose attention reads embeddings and states side by side."""

    def __init__(self, config: DecoderConfig, *, norms_residual: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(size, eps)
        self.hidden_norm = RmsNorm(size, eps)
        self.self_attn = _MixingAttention(config)
        self.post_attention_layernorm = RmsNorm(size, eps)
        self.mlp = GatedMlp(config, None)
        self._norms_residual = norms_residual

    def forward(
        self, inputs: torch.Tensor, rotations: Sequence[Rotation], kv: LayerKv
    ) -> torch.Tensor:
        embedded, states = inputs.chunk(2, dim=1)
        normed = self.hidden_norm(states)
        residual = normed if self._norms_residual else states
        hidden = self.self_attn(self.input_layernorm(embedded), normed, rotations, kv, residual)
        output: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden), residual=hidden)
        return output


class _MixingAttention(DecoderAttention):
    """Attention over two inputs side by side, each of which has its own columns of the matrix."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, 0, None)
        size = config.hidden_size
        self.qkv_proj = self._new_projection(Cut(2 * size, 0, size), bias=config.qkv_bias)
        self.states_qkv_proj = self._new_projection(Cut(2 * size, size, 2 * size), bias=False)

    @override
    def forward(  # type: ignore[override]
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        rotations: Sequence[Rotation],
        kv: LayerKv,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        qkv = self.states_qkv_proj(states, residual=self.qkv_proj(embedded))
        return self._attend(qkv, rotations, kv, residual)


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """The shape of Medusa heads.

    Attributes:
        hidden_size: width of the served model's states.
        num_heads: number of heads.
        num_layers: number of residual layers of a head.
        num_tokens: number of tokens that a head can draft.
        has_bias: whether the residual layers have biases.
    """

    hidden_size: int
    num_heads: int
    num_layers: int
    num_tokens: int
    has_bias: bool


class MedusaHeads(nn.Module):
    """Heads over the served model's final states.

    Args:
        config: their shape.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(
            Linear(config.hidden_size, config.num_tokens, bias=False)
            for _ in range(config.num_heads)
        )

    def forward(self, states: torch.Tensor, index: int) -> torch.Tensor:
        """Returns the logits of one head, `[n, num_tokens]` float32.

        Args:
            states: `[n, hidden_size]`; states from which the served model draws a token.
            index: number of the head, which drafts the token `index` + 1 places after that one.
        """
        head = self.lm_heads[index]
        assert isinstance(head, Linear)
        hidden = self.blocks[index](states)
        return kernels.linear(hidden, head.weight, out_dtype=torch.float32)


class _Block(nn.Module):
    """The residual layers of one Medusa head."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(
            Linear(size, size, bias=config.has_bias) for _ in range(config.num_layers)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = states + F.silu(layer(states))
        return states
