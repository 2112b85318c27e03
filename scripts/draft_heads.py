"""Heads that draft the next tokens of a served model from its hidden states.

Three kinds: Medusa (Cai et al. 2024, arXiv:2401.10774), EAGLE (Li et al. 2024,
arXiv:2401.15077) and EAGLE-3 (Li et al. 2025, arXiv:2503.01840).

All draft over whole texts at once. The draft token at place k and position t predicts the token at
t + 2. It was made from the served model's hidden states up to t - k, and from the tokens up to
t + 1, as if the k draft tokens before it had been right.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from draft_layers import DraftLayer, Eagle3Layer, layer_config, shifted
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from typing_extensions import override

__all__ = [
    "DraftHead",
    "Eagle",
    "Eagle3",
    "Medusa",
    "ServedText",
    "run_served",
]


@dataclass(frozen=True)
class ServedText:
    """The served model's results over texts, for each position but the last.

    `begins` is the first position that a head may attend to from each position. The served
    model itself attended to the whole text.
    """

    embeddings: torch.Tensor  # [texts, positions, hidden], of the token after the position
    hidden: torch.Tensor  # [texts, positions, hidden], after the final norm
    layer_inputs: list[torch.Tensor]  # [texts, positions, hidden], of each layer
    begins: torch.Tensor  # [texts, positions]
    next_logits: torch.Tensor  # [texts, positions, vocabulary], of the token at position + 2


def aux_layer_ids(num_layers: int) -> list[int]:
    """Returns the three layers whose inputs EAGLE-3 reads: an early, a middle and a late one.

    Raises:
        ValueError: the served model has fewer than four layers.
    """
    if num_layers < 4:
        raise ValueError(f"EAGLE-3 needs a served model of at least 4 layers, not {num_layers}")
    if num_layers < 6:
        return [1, num_layers // 2, num_layers - 1]
    return [2, num_layers // 2, num_layers - 3]


@torch.no_grad()
def run_served(
    served: LlamaForCausalLM, token_ids: torch.Tensor, begins: torch.Tensor
) -> ServedText:
    """Runs the served model over `token_ids` [texts, tokens]."""
    outputs = served.model(token_ids, output_hidden_states=True, use_cache=False)
    hidden = outputs.last_hidden_state
    return ServedText(
        embeddings=served.model.embed_tokens(token_ids[:, 1:]),
        hidden=hidden[:, :-1],
        layer_inputs=[states[:, :-1] for states in outputs.hidden_states],
        begins=begins[:, :-1],
        next_logits=served.lm_head(hidden[:, 1:]),
    )


class DraftHead(nn.Module, ABC):
    """Base of all heads; `vocabulary` is the served id of each draft id."""

    vocabulary: torch.Tensor  # [draft vocabulary]

    @abstractmethod
    def draft(self, text: ServedText, num_places: int) -> list[torch.Tensor]:
        """Returns the logits at the first places: each [texts, positions, draft vocabulary]."""

    @abstractmethod
    def config_fields(self) -> dict[str, Any]:
        """Returns the contents of `config.json`."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the contents of `model.safetensors`."""
        return {name: tensor.contiguous() for name, tensor in self.state_dict().items()}


def _copied(weight: torch.Tensor) -> nn.Linear:
    """Returns an output head without bias that begins with `weight` [vocabulary, hidden]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    return linear


class _ResidualBlock(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size)])

    @override
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + functional.silu(self.layers[0](hidden))


class Medusa(DraftHead):
    """One head per place; each reads only the hidden state of the last known position."""

    def __init__(self, served: LlamaForCausalLM, num_heads: int) -> None:
        super().__init__()
        size, vocab_size = served.config.hidden_size, served.config.vocab_size
        self.register_buffer("vocabulary", torch.arange(vocab_size), persistent=False)
        self.blocks = nn.ModuleList(_ResidualBlock(size) for _ in range(num_heads))
        self.lm_heads = nn.ModuleList(_copied(served.lm_head.weight) for _ in range(num_heads))
        self.hidden_size, self.vocab_size = size, vocab_size
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    @override
    def draft(self, text: ServedText, num_places: int) -> list[torch.Tensor]:
        heads = list(zip(self.blocks, self.lm_heads, strict=True))[:num_places]
        return [
            lm_head(block(shifted(text.hidden, place)))
            for place, (block, lm_head) in enumerate(heads)
        ]

    @override
    def config_fields(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.vocab_size,
            "num_heads": len(self.blocks),
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "dtype": "float32",
        }


class _AutoregressiveHead(DraftHead):
    """A head of one layer that reads its own outputs for all but the first draft token."""

    def __init__(self, served: LlamaForCausalLM) -> None:
        super().__init__()
        self.config = layer_config(served.config)
        self.rotary = LlamaRotaryEmbedding(self.config)

    def _unroll(
        self,
        text: ServedText,
        first: torch.Tensor,
        layer: Callable[..., torch.Tensor],
        num_places: int,
    ) -> list[torch.Tensor]:
        """Returns the layer's outputs at each place, from states `first` at the first place."""
        positions = torch.arange(first.shape[1])[None]
        rotary = self.rotary(first, positions)
        places: list[tuple[torch.Tensor, torch.Tensor]] = []
        outputs: list[torch.Tensor] = []
        for _ in range(num_places):
            state = shifted(outputs[-1], 1) if outputs else first
            outputs.append(layer(text.embeddings, state, rotary, text.begins, places))
        return outputs

    def _config_fields(self, **fields: Any) -> dict[str, Any]:
        layer_fields: dict[str, Any] = json.loads(self.config.to_json_string())
        return layer_fields | {"dtype": "float32"} | fields


class Eagle(_AutoregressiveHead):
    """One Llama layer that predicts the served model's next hidden state."""

    output_weight: torch.Tensor  # [vocabulary, hidden]

    def __init__(self, served: LlamaForCausalLM) -> None:
        super().__init__(served)
        size = served.config.hidden_size
        self.register_buffer("vocabulary", torch.arange(served.config.vocab_size), persistent=False)
        self.register_buffer("output_weight", served.lm_head.weight.detach(), persistent=False)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(self.config, size)])
        initialize(self, served.config.initializer_range)
        self.fc.weight.data[:, size:] = torch.eye(size)
        # Embeddings are much smaller than hidden states; without this they are learned late.
        embedding_scale = served.model.embed_tokens.weight.square().mean().sqrt()
        nn.init.normal_(self.fc.weight[:, :size], std=1 / (embedding_scale.item() * size**0.5))

    @override
    def draft(self, text: ServedText, num_places: int) -> list[torch.Tensor]:
        states = self._unroll(text, text.hidden, self._layer, num_places)
        return [functional.linear(state, self.output_weight) for state in states]

    def _layer(
        self, embeddings: torch.Tensor, state: torch.Tensor, *attention_arguments: Any
    ) -> torch.Tensor:
        inputs = self.fc(torch.cat([embeddings, state], -1))
        outputs: torch.Tensor = self.layers[0](inputs, inputs, *attention_arguments)
        return outputs

    @override
    def config_fields(self) -> dict[str, Any]:
        return self._config_fields(architectures=["EagleLlamaForCausalLM"], bias=False)


class Eagle3(_AutoregressiveHead):
    """One Llama layer over inputs of three served layers, with an output head of its own."""

    def __init__(self, served: LlamaForCausalLM, vocabulary: torch.Tensor) -> None:
        super().__init__(served)
        size, config = self.config.hidden_size, self.config
        self.aux_layer_ids = aux_layer_ids(served.config.num_hidden_layers)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        initialize(self, config.initializer_range)
        self.fc.weight.data[:, 2 * size :] = torch.eye(size)
        self.norm.weight.data.copy_(served.model.norm.weight)
        self.lm_head = _copied(served.lm_head.weight[vocabulary])

    @override
    def draft(self, text: ServedText, num_places: int) -> list[torch.Tensor]:
        aux_hidden = torch.cat([text.layer_inputs[i] for i in self.aux_layer_ids], -1)
        states = self._unroll(text, self.fc(aux_hidden), self._layer, num_places)
        return [self.lm_head(self.norm(state)) for state in states]

    def _layer(
        self, embeddings: torch.Tensor, state: torch.Tensor, *attention_arguments: Any
    ) -> torch.Tensor:
        layer = self.midlayer
        inputs = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(state)], -1)
        outputs: torch.Tensor = layer(state, inputs, *attention_arguments)
        return outputs

    @override
    def config_fields(self) -> dict[str, Any]:
        return self._config_fields(
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=len(self.vocabulary),
            eagle_config={"eagle_aux_hidden_state_layer_ids": self.aux_layer_ids},
            tie_word_embeddings=False,
        )

    @override
    def tensors(self) -> dict[str, torch.Tensor]:
        t2d = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        t2d[self.vocabulary] = True
        d2t = self.vocabulary - torch.arange(len(self.vocabulary))
        return super().tensors() | {"d2t": d2t, "t2d": t2d}


def initialize(head: nn.Module, scale: float) -> None:
    """Draws the matrices from a normal distribution; outputs into the residual begin at zero."""
    for name, parameter in head.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=scale)
