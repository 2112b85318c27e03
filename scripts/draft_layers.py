"""The Llama layer of EAGLE's heads, which drafts several tokens over whole texts at once."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    repeat_kv,
)
from typing_extensions import override

__all__ = ["DraftLayer", "Eagle3Layer", "layer_config", "shifted"]

_SHAPE_FIELDS = (
    *("hidden_size", "intermediate_size", "hidden_act", "rms_norm_eps", "initializer_range"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters"),
    *("max_position_embeddings", "vocab_size", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id"),
)


def layer_config(served: Any) -> LlamaConfig:
    """Returns the configuration of one Llama layer of the served model's shape."""
    same = {name: getattr(served, name) for name in _SHAPE_FIELDS}
    return LlamaConfig(**same, num_hidden_layers=1, attention_bias=False, mlp_bias=False)


def shifted(states: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Moves `states` [..., positions, dim] to later positions; the first ones become zero."""
    return functional.pad(states, (0, 0, num_positions, 0))[..., : states.shape[-2], :]


class UnrolledAttention(nn.Module):
    """Llama's attention, at every position at once, for each place in turn.

    A head attends to states of two kinds: the served model's, up to its last known position,
    and its own from there on. At place k, position t has its last known position at t - k. So
    its query meets the keys of place 0 up to t - k, and one key of each later place i: the one
    at t - k + i. This is exactly what the head sees when it drafts one token after another.
    """

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    @override
    def forward(
        self,
        inputs: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        begins: torch.Tensor,
        places: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Attends from `inputs` [texts, positions, input] and adds their keys to `places`."""
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        places.append((repeat_kv(key, self.num_groups), repeat_kv(value, self.num_groups)))
        place, (first_keys, first_values) = len(places) - 1, places[0]
        own_pairs = [
            (shifted(keys, place - i), shifted(values, place - i))
            for i, (keys, values) in enumerate(places)
            if i > 0
        ]
        query = query * self.head_dim**-0.5
        scores = (query @ first_keys.mT).masked_fill(~_visible(begins, place), -torch.inf)
        own_scores = [(query * keys).sum(-1, keepdim=True) for keys, _ in own_pairs]
        shares = torch.cat([scores, *own_scores], -1).softmax(-1)
        num_keys = scores.shape[-1]
        mixed = shares[..., :num_keys] @ first_values
        for i, (_, values) in enumerate(own_pairs, start=num_keys):
            mixed = mixed + shares[..., i : i + 1] * values
        outputs: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return outputs


def _visible(begins: torch.Tensor, place: int) -> torch.Tensor:
    """Returns which keys of place 0 each position may see: [texts, 1, positions, positions]."""
    positions = torch.arange(begins.shape[1])
    known = positions[None, :] <= positions[:, None] - place
    return (known & (positions >= begins[:, :, None]))[:, None]


class DraftLayer(nn.Module):
    """A Llama layer without the norm before its attention."""

    def __init__(self, config: LlamaConfig, attention_input_size: int) -> None:
        super().__init__()
        self.self_attn = UnrolledAttention(config, attention_input_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    @override
    def forward(
        self, residual: torch.Tensor, attention_input: torch.Tensor, *attention_arguments: Any
    ) -> torch.Tensor:
        residual = residual + self.self_attn(attention_input, *attention_arguments)
        outputs: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return outputs


class Eagle3Layer(DraftLayer):
    """EAGLE-3's layer, which attends to the embedding and the state side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
