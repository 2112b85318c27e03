"""`PagedKv`: the one argument that gives a model's layers their KV cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.attention_metadata import AttentionMetadata

__all__ = ["LayerKv", "PagedKv"]


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's KV cache in one step.

    Attributes:
        cache: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, a view of the pool.
        meta: what to write and read there.
    """

    cache: torch.Tensor
    meta: AttentionMetadata


@dataclass(frozen=True, slots=True)
class PagedKv:
    """The KV cache of all layers in one step.

    Layers that attend to different windows hold different blocks: each *layer
    group* has its own block tables, and one block holds one group's layers.

    Attributes:
        pool: `[num_blocks, layers_per_block, 2, num_kv_heads, block_size, head_dim]`.
        groups: per layer group, what the step writes and reads.
        slots: per layer, (group, index within the group's blocks).
    """

    pool: torch.Tensor
    groups: Sequence[AttentionMetadata]
    slots: Sequence[tuple[int, int]]

    def layers(self) -> Iterator[LayerKv]:
        """Each layer's part, from the first layer on."""
        for group, index in self.slots:
            yield LayerKv(self.pool[:, index], self.groups[group])
