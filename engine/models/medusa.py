"""Medusa heads (arXiv:2401.10774), each of which drafts the token at one later place."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's usual name for it
from torch import nn

import kernels
from engine.models.linear import Linear

__all__ = ["MedusaConfig", "MedusaHeads"]


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
    """The residual layers of one head."""

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
