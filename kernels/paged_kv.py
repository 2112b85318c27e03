"""Arguments of attention and of recurrent layers: sequences, the KV cache with the states, and what
prepares queries and keys.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.layer_kinds import NormKind

__all__ = [
    "Attend",
    "AttentionMetadata",
    "DeltaGates",
    "LayerKv",
    "LayerState",
    "LogitRows",
    "PagedKv",
    "QkNorms",
    "Rotation",
]


Attend = Callable[..., torch.Tensor]
"""Computes attention; has the arguments of `kernels.paged_attention`."""


# Compared by identity: kernels cache what they derive from an instance for as long as it lives.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionMetadata:
    """One step's sequences, laid end to end in one row of query tokens.

    Attributes:
        block_tables: `[num_seqs, max_blocks]` int32. Entries past a context, and before its
            sliding window, may be any block ids of the pool.
        query_starts: `[num_seqs + 1]` int32; sequence i's query tokens are rows
            `query_starts[i]` to `query_starts[i + 1]`, or none at all: such a sequence only pads
            the step.
        context_lens: `[num_seqs]` int32; tokens in the KV cache once this
            step's are written. Query j of sequence i stands at position
            `context_lens[i] - query_len[i] + j`.
        slot_mapping: `[num_tokens]` int64; the slot that each query token's K and V are written
            to: `block_id * block_size + offset`.
        max_query_len: longest query of the step.
        max_context_len: longest context of the step.
        num_unkept: `[num_seqs]` int32; tokens at the end of each sequence that are only proposed,
            so that no state after them is stored (see `LayerState`). None for 0.
        attend: what computes the attention of this step; None for `kernels.paged_attention`.
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_unkept: torch.Tensor | None = None
    attend: Attend | None = None


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
        cache: `[num_blocks, num_parts, num_kv_heads, block_size, head_dim]`, a view of the pool.
            The parts are K and V, or one latent vector (see `rotate_and_write_latent`).
        scales: `[num_blocks, num_parts, num_kv_heads, block_size]` float32, the factor on each
            vector of `cache`; None if the cache has the model's type.
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
class LayerState:
    """One recurrent layer's states in one step.

    A *slot* holds the layer's state after one token of one sequence. Entry i of a sequence's table
    names the slot of the state at the end of its block i, or, in the last block, after its last
    token. For a sequence whose tokens `[start, end)` the step computes, with
    `kept_end = end - num_unkept`, a kernel

    - reads the state from entry `(start - 1) // block_size`, and begins with zeros if `start` is 0;
    - stores the state after the last token of each block, and after token `kept_end - 1`, into the
      entry of that token's block, if the entry is not negative and the token lies before
      `kept_end`.

    A sequence's state is read before any is stored, so both may be one slot. No other sequence of
    the step reads a slot that is stored into.

    Attributes:
        parts: the parts of a state, each `[num_slots, head_slices, heads_per_slice, width]`; the
            last two axes are dense.
        meta: metadata of all tokens of the step; its block tables hold slots.
        block_size: tokens per entry of a table.
        rows: `[num_computed]` int64; indices of the tokens that are computed further once the
            state has seen all. None for all tokens.
    """

    parts: tuple[torch.Tensor, ...]
    meta: AttentionMetadata
    block_size: int
    rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PagedKv:
    """The KV cache of all layers in one step, and the states of recurrent layers.

    Layers that attend to different windows hold different blocks: each *layer
    group* has its own block tables, and one block holds the layers of one layer group. Recurrent
    layers are a layer group whose tables hold slots of states.

    Attributes:
        pool: `[num_blocks, layers_per_block, num_parts, num_kv_heads, block_size, head_dim]`, any
            strides, of the model's type, or float8_e4m3fn or int8 with `scales`.
        layer_groups: per layer group, the KV that the step writes and reads.
        slots: per layer, (layer group, index within the layer group's blocks).
        logit_rows: the tokens whose logits are wanted; None for all. Once the last layer's KV is
            written, only these tokens are computed further.
        scales: `[num_blocks, layers_per_block, num_parts, num_kv_heads, block_size]` float32, any
            strides, the factor on each vector of `pool`; None if the pool has the model's type.
        on_layer: called with 1 when the first layer is computed, with 2 after the second, and so
            on; on a GPU, when it is launched.
        state_group: the layer group of the recurrent layers; None if there are none.
        states: per recurrent layer, in the order of their indices in `slots`, the `parts` of its
            `LayerState`.
        group_shapes: per layer group of attention layers, `(layers_per_block, num_kv_heads,
            head_dim)` of its blocks, which are as large as those of `pool`; empty if all have the
            shape of `pool`.
    """

    pool: torch.Tensor
    layer_groups: Sequence[AttentionMetadata]
    slots: Sequence[tuple[int, int]]
    logit_rows: LogitRows | None = None
    scales: torch.Tensor | None = None
    on_layer: Callable[[int], None] | None = None
    state_group: int | None = None
    states: Sequence[tuple[torch.Tensor, ...]] = ()
    group_shapes: Sequence[tuple[int, int, int]] = ()

    def layers(self) -> Iterator[LayerKv | LayerState]:
        """Yields each layer's part, from the first layer to the last."""
        for layer, (layer_group, index) in enumerate(self.slots, 1):
            is_last = layer == len(self.slots)
            logit_rows = self.logit_rows if is_last else None
            if layer_group == self.state_group:
                yield self._layer_state(index, logit_rows)
            else:
                yield self._layer_kv(layer_group, index, logit_rows)
            if self.on_layer is not None:
                self.on_layer(layer)

    def _layer_state(self, index: int, logit_rows: LogitRows | None) -> LayerState:
        assert self.state_group is not None
        meta, block_size = self.layer_groups[self.state_group], self.pool.shape[4]
        rows = None if logit_rows is None else logit_rows.rows
        return LayerState(self.states[index], meta, block_size, rows)

    def _layer_kv(self, layer_group: int, index: int, logit_rows: LogitRows | None) -> LayerKv:
        cache, written = self._blocks_of(layer_group)[:, index], self.layer_groups[layer_group]
        scales = None if self.scales is None else self.scales[:, index]
        if logit_rows is None:
            return LayerKv(cache, scales, written, written, None)
        return LayerKv(
            cache, scales, written, logit_rows.layer_groups[layer_group], logit_rows.rows
        )

    def _blocks_of(self, layer_group: int) -> torch.Tensor:
        if not self.group_shapes:
            return self.pool
        num_layers, num_heads, head_dim = self.group_shapes[layer_group]
        num_blocks, _, num_parts, _, block_size, _ = self.pool.shape
        return self.pool.view(num_blocks, num_layers, num_parts, num_heads, block_size, head_dim)


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
    """Root-mean-square norms of each head of queries, keys and, in some families, values.

    Attributes:
        query_weight: `[head_dim]`.
        key_weight: `[head_dim]`.
        eps: added to the mean of squares.
        kind: of both norms.
        norms_values: whether values are normalized too, without a weight.
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
    kind: NormKind = NormKind.ROUNDED
    norms_values: bool = False


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """What decides how much the gated delta rule writes and forgets, per token and head.

    Attributes:
        update: `[num_tokens, num_heads]`; its sigmoid is the share of the difference that is
            written.
        decay: `[num_tokens, num_heads]`; with `decay_bias`, the input of a softplus.
        log_rates: `[num_heads]`; logarithms of the rates at which the state decays.
        decay_bias: `[num_heads]`.
    """

    update: torch.Tensor
    decay: torch.Tensor
    log_rates: torch.Tensor
    decay_bias: torch.Tensor
