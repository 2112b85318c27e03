"""What the model families share: the model's interface, norms, cached attention."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import nn

import kernels
from engine.models.config import ModelConfig, unsupported
from engine.models.linear import Embedding, Linear, PackedModule, WeightTarget
from kernels import QkNorms, Rotation
from kernels.paged_kv import LayerKv, PagedKv

__all__ = [
    "CausalModel",
    "RmsNorm",
    "activation_named",
    "cached_attention",
    "going_on",
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
    lm_head: Linear | None
    """None where the embedding is the output head too."""

    def __init__(self, config: ModelConfig, head_width: int) -> None:
        super().__init__()
        self.config = config
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(head_width, config.vocab_size, bias=False)
        )

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: PagedKv
    ) -> torch.Tensor:
        """Runs the layers over one step's tokens, writing their KV into the pool.

        Args:
            token_ids: `[num_tokens]` int64.
            positions: `[num_tokens]` int64.
            kv: which KV each token writes and reads, and whose output is wanted.

        Returns:
            Final hidden states of the asking tokens, `[num_asking, hidden_size]`.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: `[rows, hidden_size]` to float32 `[rows, vocab_size]`."""

    def checkpoint_tensors(self) -> dict[str, WeightTarget]:
        """Checkpoint name -> what takes over that tensor."""
        tensors: dict[str, WeightTarget] = {}
        for path, module in self.named_modules():
            full_path = path if path == "lm_head" else self.checkpoint_prefix + path
            if isinstance(module, PackedModule):
                tensors.update(module.checkpoint_tensors(full_path))
            else:
                for name, parameter in module.named_parameters(recurse=False):
                    tensors[f"{full_path}.{name}"] = parameter
        return tensors

    def _head(self, hidden: torch.Tensor, embedding: Embedding) -> torch.Tensor:
        """`[rows, head_width]` to float32 `[rows, vocab_size]`."""
        weight = embedding.weight if self.lm_head is None else self.lm_head.weight
        return kernels.linear(hidden, weight, out_dtype=torch.float32)


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
    rotation: Rotation | None = None,
    norms: QkNorms | None = None,
) -> torch.Tensor:
    """Writes the step's KV, then attends over the cache with the tokens that go on.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; undefined afterwards, as `key`.
        key: `[num_tokens, num_kv_heads, head_dim]`.
        value: as `key`.
        kv: where to write and what to read.
        scale: factor on the scores.
        sliding_window: how many tokens a query sees, itself included.
        rotation: of query and key, by position.
        norms: of query and key, before they turn.

    Returns:
        `[num_attending, num_heads * head_dim]`.
    """
    query = kernels.rotate_and_write_kv(
        query,
        key,
        value,
        kv.cache,
        kv.written,
        rotation=rotation,
        norms=norms,
        kv_scales=kv.scales,
    )
    query = going_on(query, kv)
    if len(query):
        query = kernels.paged_attention(
            query,
            kv.cache,
            kv.attended,
            scale=scale,
            sliding_window=sliding_window,
            kv_scales=kv.scales,
        )
    return query.flatten(1)


def going_on(states: torch.Tensor, kv: LayerKv) -> torch.Tensor:
    """What a layer goes on with once everybody's KV is written.

    Args:
        states: `[num_tokens, ...]`.
        kv: of the layer.

    Returns:
        `[num_attending, ...]`.
    """
    if kv.rows is None:
        return states
    return kernels.take_rows(states.flatten(1), kv.rows).view(len(kv.rows), *states.shape[1:])


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
