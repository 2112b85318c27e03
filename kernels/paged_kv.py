"""Arguments of attention: sequences, the KV cache, and what prepares queries and keys."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.layer_kinds import NormKind

__all__ = ["AttentionMetadata", "LayerKv", "LogitRows", "PagedKv", "QkNorms", "Rotation"]


# Compared by identity: kernels cache what they derive from an instance for as long as it lives.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionMetadata:
    """One step's sequences, laid end to end in one row of query tokens.

    Attributes:
        block_tables: `[num_seqs, max_blocks]` int32. Entries past a context, and before its
            sliding window, may be any block ids of the pool.
        query_starts: `[num_seqs + 1]` int32; sequence i's query tokens are rows
            `query_starts[i]` to `query_starts[i + 1]`.
        context_lens: `[num_seqs]` int32; tokens in the KV cache once this
            step's are written. Query j of sequence i stands at position
            `context_lens[i] - query_len[i] + j`.
        slot_mapping: `[num_tokens]` int64; the slot that each query token's K and V are written
            to: `block_id * block_size + offset`.
        max_query_len: longest query of the step.
        max_context_len: longest context of the step.
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The tokens of a step whose logits are wanted.

    Attributes:
        rows: `[num_logit_rows]` int64, ascending; indices of the tokens in the step.
        layer_groups: per layer group, metadata in which each of the tokens is a sequence of one
            query token.
    """

    rows: torch.Tensor
    layer_groups: Sequence[AttentionMetadata]


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's KV cache in one step.

    Attributes:
        cache: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, a view of the pool.
        scales: `[num_blocks, 2, num_kv_heads, block_size]` float32, the factor on each vector of
            `cache`; None if the cache has the model's type.
        written: metadata of all tokens of the step, whose K and V are written.
        attended: metadata of the tokens in `rows`, which attend.
        rows: `[num_attending]` int64; indices of the tokens that attend and are computed further.
            None for all tokens.
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
    group* has its own block tables, and one block holds the layers of one layer group.

    Attributes:
        pool: `[num_blocks, layers_per_block, 2, num_kv_heads, block_size, head_dim]`, any
            strides, of the model's type, or float8_e4m3fn with `scales`.
        layer_groups: per layer group, the KV that the step writes and reads.
        slots: per layer, (layer group, index within the layer group's blocks).
        logit_rows: the tokens whose logits are wanted; None for all. Once the last layer's KV is
            written, only these tokens are computed further.
        scales: `[num_blocks, layers_per_block, 2, num_kv_heads, block_size]` float32, any
            strides, the factor on each vector of `pool`; None if the pool has the model's type.
        on_layer: called with 1 when the first layer is computed, with 2 after the second, and so
            on; on a GPU, when it is launched.
    """

    pool: torch.Tensor
    layer_groups: Sequence[AttentionMetadata]
    slots: Sequence[tuple[int, int]]
    logit_rows: LogitRows | None = None
    scales: torch.Tensor | None = None
    on_layer: Callable[[int], None] | None = None

    def layers(self) -> Iterator[LayerKv]:
        """Yields each layer's part, from the first layer to the last."""
        for layer, (layer_group, index) in enumerate(self.slots, 1):
            cache, written = self.pool[:, index], self.layer_groups[layer_group]
            scales = None if self.scales is None else self.scales[:, index]
            if self.logit_rows is None or layer < len(self.slots):
                yield LayerKv(cache, scales, written, written, None)
            else:
                attended, rows = self.logit_rows.layer_groups[layer_group], self.logit_rows.rows
                yield LayerKv(cache, scales, written, attended, rows)
            if self.on_layer is not None:
                self.on_layer(layer)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of each token's angles.

    Attributes:
        cos: `[num_tokens, rotary_dim / 2]` float32. The first `rotary_dim` elements of a head are
            rotated, and the rest is unchanged.
        sin: as `cos`.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class QkNorms:
    """Root-mean-square norms of each head of queries and keys.

    Attributes:
        query_weight: `[head_dim]`.
        key_weight: `[head_dim]`.
        eps: added to the mean of squares.
        kind: of both norms.
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
    kind: NormKind = NormKind.ROUNDED
