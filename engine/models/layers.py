"""What the model families share: the model's interface, fused layers, cached attention.

A model's parameters are laid out for speed, not as in the checkpoint: Q, K and
V are one matrix, and so on. `CausalModel.checkpoint_tensors` says where each
checkpoint tensor belongs, as a view of the parameter; the loader copies.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import nn

import kernels
from engine.models.config import ModelConfig, unsupported
from kernels.paged_kv import LayerKv, PagedKv

__all__ = [
    "CausalModel",
    "FusedLinear",
    "RmsNorm",
    "TransposedLinear",
    "activation_named",
    "cached_attention",
]

Activation = Callable[[torch.Tensor], torch.Tensor]


class CausalModel(nn.Module, ABC):
    """A decoder-only model: `model(token_ids, positions, kv)`, then `logits`.

    Submodules bear their names in the checkpoint, after `checkpoint_prefix`.

    Args:
        config: the model's shape.
        head_width: input width of the output head.
    """

    checkpoint_prefix: ClassVar[str]
    config: ModelConfig
    lm_head: nn.Linear | None
    """None where the embedding is the output head too."""

    def __init__(self, config: ModelConfig, head_width: int) -> None:
        super().__init__()
        self.config = config
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(head_width, config.vocab_size, bias=False)
        )

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: PagedKv
    ) -> torch.Tensor:
        """Runs the layers over one step's tokens, writing their KV into the pool.

        Args:
            token_ids: `[num_tokens]` int64.
            positions: `[num_tokens]` int64.
            kv: which KV each token writes and reads.

        Returns:
            Final hidden states, `[num_tokens, hidden_size]`.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: `[rows, hidden_size]` to float32 `[rows, vocab_size]`."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the view of a parameter that holds that tensor."""
        tensors: dict[str, torch.Tensor] = {}
        for path, module in self.named_modules():
            full_path = path if path == "lm_head" else self.checkpoint_prefix + path
            if isinstance(module, FusedLinear | TransposedLinear):
                tensors.update(module.checkpoint_tensors(full_path))
            else:
                for name, parameter in module.named_parameters(recurse=False):
                    tensors[f"{full_path}.{name}"] = parameter
        return tensors

    def _head(self, hidden: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        """`[rows, head_width]` to float32 `[rows, vocab_size]`."""
        weight = embedding.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, weight).float()


class FusedLinear(nn.Linear):
    """Linear layers of one input as one matrix.

    Args:
        in_features: width of the input.
        parts: checkpoint name -> width of that layer's output, in output order.
        bias: whether the layers have biases.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The parts' weights and biases under their own names, beside `path`."""
        parent = path.rpartition(".")[0]
        for name, parameter in self.named_parameters():
            slices = torch.split(parameter, list(self.parts.values()))
            for part, rows in zip(self.parts, slices, strict=True):
                yield f"{parent}.{part}.{name}", rows


class TransposedLinear(nn.Linear):
    """A linear layer whose checkpoint holds the matrix as `[in, out]` (GPT-2's Conv1D)."""

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Weight and bias; copying into the weight's view transposes it."""
        yield f"{path}.weight", self.weight.t()
        yield f"{path}.bias", self.bias


class RmsNorm(nn.Module):
    """Root-mean-square norm with a learned scale over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., size]` to the same shape."""
        return kernels.rms_norm(hidden, self.weight, self.eps)


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: LayerKv,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Writes the step's KV, then attends over the cache.

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        key: `[num_tokens, num_kv_heads, head_dim]`.
        value: as `key`.
        kv: where to write and what to read.
        scale: factor on the scores.
        sliding_window: how many tokens a query sees, itself included.

    Returns:
        `[num_tokens, num_heads * head_dim]`.
    """
    kernels.write_kv(key, value, kv.cache, kv.meta.slot_mapping)
    return kernels.paged_attention(
        query, kv.cache, kv.meta, scale=scale, sliding_window=sliding_window
    ).flatten(1)


def _gelu_tanh(hidden: torch.Tensor) -> torch.Tensor:
    return F.gelu(hidden, approximate="tanh")


_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "silu": F.silu,
    }
)


def activation_named(name: str) -> Activation:
    """The activation that config.json calls `name`.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in _ACTIVATIONS:
        raise unsupported("activation_function", name)
    return _ACTIVATIONS[name]
