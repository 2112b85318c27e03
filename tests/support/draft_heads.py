"""Random heads that draft tokens, and what they draft, in plain torch."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zlib import crc32

import torch
import torch.nn.functional as F  # noqa: N812 - torch's usual name for it
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import reference_model

__all__ = ["METHODS", "ReferenceHeads", "random_heads"]

METHODS = ("medusa", "eagle", "eagle3")

_NUM_HEADS = 3  # of Medusa
_NUM_DRAFTABLE = 150  # tokens of EAGLE-3's head
_AUX_LAYERS = (0, 1, 2)
_SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}

Draw = Callable[[torch.Tensor, int], int]
"""Draws the token at a position from `[vocab]` logits."""


def random_heads(method: str, served: Path, folder: Path) -> Path:
    """Writes a checkpoint of random heads for a served model; returns its folder."""
    folder.mkdir(parents=True)
    model = reference_model(served)
    size, vocab_size = model.config.hidden_size, model.config.vocab_size
    generator = torch.Generator().manual_seed(crc32(method.encode()))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    config: dict[str, object] = {"hidden_size": size, "vocab_size": vocab_size}
    if method == "medusa":
        tensors = {
            f"lm_heads.{index}.weight": matrix(vocab_size, size) for index in range(_NUM_HEADS)
        }
        for index in range(_NUM_HEADS):
            tensors[f"blocks.{index}.layers.0.weight"] = matrix(size, size)
            tensors[f"blocks.{index}.layers.0.bias"] = matrix(1, size)[0]
        config |= {"num_heads": _NUM_HEADS, "num_hidden_layers": 1}
    else:
        width, layer = (size, "layers.0") if method == "eagle" else (2 * size, "midlayer")
        sizes = {"self_attn.q_proj": (64, width), "self_attn.k_proj": (32, width)}
        sizes |= {"self_attn.v_proj": (32, width), "self_attn.o_proj": (size, 64)}
        sizes |= {"mlp.gate_proj": (80, size), "mlp.up_proj": (80, size)}
        sizes |= {"mlp.down_proj": (size, 80)}
        tensors = {f"{layer}.{name}.weight": matrix(*shape) for name, shape in sizes.items()}
        norms = [f"{layer}.post_attention_layernorm"]
        config |= _SHAPE
        if method == "eagle":
            tensors["fc.weight"] = matrix(size, 2 * size)
        else:
            tensors["fc.weight"] = matrix(size, 3 * size)
            tensors["lm_head.weight"] = matrix(_NUM_DRAFTABLE, size)
            ids = torch.randperm(vocab_size, generator=generator)[:_NUM_DRAFTABLE].sort().values
            tensors["d2t"] = ids - torch.arange(_NUM_DRAFTABLE)
            tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
            norms += ["norm", f"{layer}.input_layernorm", f"{layer}.hidden_norm"]
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(_AUX_LAYERS)}
        for name in norms:
            tensors[f"{name}.weight"] = 1 + 0.2 * matrix(1, size)[0]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class ReferenceHeads:
    """The drafts of heads.

    Attributes:
        method: of the heads.
        served: checkpoint of the served model.
        folder: as `random_heads` has written it.
        window: number of tokens that an EAGLE head sees.
    """

    method: str
    served: Path
    folder: Path
    window: int = 256

    @torch.no_grad()
    def draft_tokens(
        self, tokens: Sequence[int], start: int, num_drafts: int, draw: Draw
    ) -> list[int]:
        """Returns the draft tokens that follow a sequence.

        Args:
            tokens: the sequence.
            start: position of the first token whose state the head sees.
            num_drafts: how many.
            draw: draws one.
        """
        states = _states(self.served, tuple(tokens))
        if self.method == "medusa":
            return self._medusa(states[-1][len(tokens) - 2], len(tokens), num_drafts, draw)
        weights, embedding = self._weights(), _embedding(self.served)
        if self.method == "eagle":
            known = states[-1]
        else:
            known = torch.cat([states[layer] for layer in _AUX_LAYERS], 1) @ weights["fc.weight"].T
        embedded = [embedding[token] for token in tokens[start + 1 :]]
        mixed = list(known[start : len(tokens) - 1])
        draft_tokens: list[int] = []
        for _ in range(num_drafts):
            output = self._layer(weights, torch.stack(embedded), torch.stack(mixed))[-1]
            draft_tokens.append(
                draw(self._logits(weights, output), len(tokens) + len(draft_tokens))
            )
            embedded.append(embedding[draft_tokens[-1]])
            mixed.append(output)
        return draft_tokens

    def _medusa(self, state: torch.Tensor, end: int, num_drafts: int, draw: Draw) -> list[int]:
        weights, draft_tokens = self._weights(), list[int]()
        for index in range(min(num_drafts, _NUM_HEADS)):
            block = f"blocks.{index}.layers.0"
            linear = F.linear(state, weights[f"{block}.weight"], weights[f"{block}.bias"])
            hidden = state + F.silu(linear)
            draft_tokens.append(draw(weights[f"lm_heads.{index}.weight"] @ hidden, end + index))
        return draft_tokens

    def _layer(
        self, weights: dict[str, torch.Tensor], embedded: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """Returns the head's own states, `[num_tokens, hidden_size]`."""
        if self.method == "eagle":
            layer = "layers.0"
            residual = inputs = torch.cat((embedded, states), 1) @ weights["fc.weight"].T
        else:
            layer, residual = "midlayer", states
            normed = _norm(embedded, weights[f"{layer}.input_layernorm.weight"])
            inputs = torch.cat((normed, _norm(states, weights[f"{layer}.hidden_norm.weight"])), 1)
        hidden = residual + self._attention(weights, f"{layer}.self_attn", inputs)
        normed = _norm(hidden, weights[f"{layer}.post_attention_layernorm.weight"])
        gate, up, down = (
            weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        return hidden + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def _attention(
        self, weights: dict[str, torch.Tensor], path: str, inputs: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = (
            (inputs @ weights[f"{path}.{name}_proj.weight"].T)
            .view(len(inputs), -1, 16)
            .transpose(0, 1)
            for name in "qkv"
        )
        query, key = _rotate(query), _rotate(key).repeat_interleave(2, 0)
        distance = torch.arange(len(inputs))[:, None] - torch.arange(len(inputs))
        is_seen = (distance >= 0) & (distance < self.window)
        scores = (query @ key.mT / 16**0.5).masked_fill(~is_seen, -torch.inf)
        attended = scores.softmax(-1) @ value.repeat_interleave(2, 0)
        return attended.transpose(0, 1).flatten(1) @ weights[f"{path}.o_proj.weight"].T

    def _logits(self, weights: dict[str, torch.Tensor], state: torch.Tensor) -> torch.Tensor:
        """Returns the logits of all tokens of the served model."""
        model = reference_model(self.served)
        if self.method == "eagle":
            return model.lm_head(state)
        logits = torch.full((model.config.vocab_size,), -torch.inf)
        ids = weights["d2t"] + torch.arange(_NUM_DRAFTABLE)
        logits[ids] = weights["lm_head.weight"] @ _norm(state, weights["norm.weight"])
        return logits

    def _weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")


@cache
def _states(served: Path, tokens: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Returns the inputs of each layer, and the final states, each `[num_tokens, hidden_size]`."""
    with torch.no_grad():
        output = reference_model(served)(torch.tensor([tokens]), output_hidden_states=True)
    return tuple(states[0] for states in output.hidden_states)


def _embedding(served: Path) -> torch.Tensor:
    return reference_model(served).get_input_embeddings().weight


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden, weight.shape, weight, 1e-5)


def _rotate(heads: torch.Tensor) -> torch.Tensor:
    """Rotates `[num_heads, num_tokens, 16]` by the angles of positions from 0 on."""
    frequencies = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    angles = torch.outer(torch.arange(heads.shape[1]).float(), frequencies).repeat(1, 2)
    first, second = heads.chunk(2, dim=-1)
    return heads * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
