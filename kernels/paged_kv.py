"""`PagedKv`: the one argument that gives a model's layers their KV cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.attention_metadata import AttentionMetadata

__all__ = ["AskingTokens", "LayerKv", "PagedKv"]


@dataclass(frozen=True, slots=True)
class AskingTokens:
    """Those of a step's tokens whose output somebody wants.

    Attributes:
        rows: `[num_asking]` int64, rising; which of the step's tokens they are.
        groups: per layer group, each of them as a sequence of one query token.
    """

    rows: torch.Tensor
    groups: Sequence[AttentionMetadata]


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's KV cache in one step.

    Attributes:
        cache: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, a view of the pool.
        scales: `[num_blocks, 2, num_kv_heads, block_size]` float32, the factor on each vector of
            `cache`; None without.
        written: where the step's tokens write.
        attended: what the tokens that attend read: those in `rows`.
        rows: `[num_attending]` int64; which of the step's tokens attend and go on. None for all.
    """

    cache: torch.Tensor
    scales: torch.Tensor | None
    written: AttentionMetadata
    attended: AttentionMetadata
    rows: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PagedKv:
    """The KV cache of all layers in one step.

    Layers that attend to different windows hold different blocks: each *layer
    group* has its own block tables, and one block holds one group's layers.

    Attributes:
        pool: `[num_blocks, layers_per_block, 2, num_kv_heads, block_size, head_dim]`, any
            strides, of the model's type, or float8_e4m3fn with `scales`.
        groups: per layer group, what the step writes and reads.
        slots: per layer, (group, index within the group's blocks).
        asking: the tokens whose output is wanted; None for all. What follows the last
            layer's KV is nobody's but theirs.
        scales: `[num_blocks, layers_per_block, 2, num_kv_heads, block_size]` float32, any
            strides, the factor on each vector of `pool`; None without.
        on_layer: called with 1 when the first layer is computed, with 2 after the second, and so
            on; on a GPU, when it is launched.
    """

    pool: torch.Tensor
    groups: Sequence[AttentionMetadata]
    slots: Sequence[tuple[int, int]]
    asking: AskingTokens | None = None
    scales: torch.Tensor | None = None
    on_layer: Callable[[int], None] | None = None

    def layers(self) -> Iterator[LayerKv]:
        """Each layer's part, from the first layer on."""
        for layer, (group, index) in enumerate(self.slots, 1):
            cache, written = self.pool[:, index], self.groups[group]
            scales = None if self.scales is None else self.scales[:, index]
            if self.asking is None or layer < len(self.slots):
                yield LayerKv(cache, scales, written, written, None)
            else:
                attended, rows = self.asking.groups[group], self.asking.rows
                yield LayerKv(cache, scales, written, attended, rows)
            if self.on_layer is not None:
                self.on_layer(layer)
