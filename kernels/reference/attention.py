"""Paged attention, in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from kernels.dispatch import kernel
from kernels.paged_kv import AttentionMetadata

__all__ = ["paged_attention"]

# The most K and V elements that decode rows gather at once; bounds the memory of one step.
_MAX_GATHERED_ELEMENTS = 1 << 24


@kernel("query.device", "query.dtype")
def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> torch.Tensor:
    """Causal grouped-query attention of each query token over its sequence's cached KV.

    The step's own K and V must have been written already. Slots past a
    context, or before its window, may hold anything, NaN included. A sequence
    with an empty context yields zeros.

    In latent attention (DeepSeek-V2, arXiv:2405.04434), all heads share one cached vector per
    token: it is their key, and its first elements are their value.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, sequences end to end.
        kv_layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, any strides, of the
            type of `query`, or float8_e4m3fn or int8 with `kv_scales`. With `value_dim` the second
            axis has one entry.
        meta: which rows belong to which sequence, and where its blocks are.
        scale: factor on the scores.
        sliding_window: how many tokens a query attends to, itself included; None for all.
        soft_cap: scores s become `soft_cap * tanh(s / soft_cap)` (Gemma 2, arXiv:2408.00118);
            None leaves the scores unchanged.
        sinks: `[num_heads]`, of the type of `query`; scores without keys or values, uncapped,
            which take part in each head's softmax (gpt-oss, arXiv:2508.10925). None for none.
        kv_scales: `[num_blocks, 2, num_kv_heads, block_size]` float32, any strides; factor on
            each token's vector in `kv_layer`, whose second axis it shares.
        value_dim: number of elements of a value, which are the first ones of the key; None if
            `kv_layer` holds values of their own.

    Returns:
        `[num_tokens, num_heads, value_dim]`, or shaped as `query` if that is None.
    """
    cache = _Cache(kv_layer, kv_scales, query.dtype, value_dim or query.shape[2])
    rule = _Rule(scale, sliding_window, soft_cap, sinks)
    if meta.max_query_len == 1:
        return _attend_single_rows(query, cache, meta, rule)
    output = query.new_empty(*query.shape[:2], cache.value_dim)
    starts, contexts = meta.query_starts.tolist(), meta.context_lens.tolist()
    single_sequences = []
    for index, context_len in enumerate(contexts):
        rows = slice(starts[index], starts[index + 1])
        if rows.stop - rows.start == 1:
            single_sequences.append(index)
            continue
        output[rows] = _attend_prompt(
            query[rows], cache, meta.block_tables[index], context_len, rule
        )
    if single_sequences:
        chosen = torch.tensor(single_sequences, device=query.device)
        row_ids = meta.query_starts[chosen]
        singles = AttentionMetadata(
            block_tables=meta.block_tables[chosen],
            query_starts=meta.query_starts,
            context_lens=meta.context_lens[chosen],
            slot_mapping=meta.slot_mapping,
            max_query_len=1,
            max_context_len=meta.max_context_len,
        )
        output[row_ids] = _attend_single_rows(query[row_ids], cache, singles, rule)
    return output


@dataclass(frozen=True, slots=True)
class _Cache:
    """One layer's KV, and the element type that it is read as."""

    kv_layer: torch.Tensor
    kv_scales: torch.Tensor | None
    dtype: torch.dtype
    value_dim: int

    def gather(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Returns blocks as `[n, num_parts, num_kv_heads, block_size, head_dim]`."""
        if self.kv_scales is None:
            return self.kv_layer.index_select(0, block_ids)
        # Viewed as bytes, since not every operation supports float8.
        narrow = self.kv_layer.view(torch.uint8).index_select(0, block_ids)
        scales = self.kv_scales.index_select(0, block_ids).unsqueeze(-1)
        return (narrow.view(self.kv_layer.dtype).float() * scales).to(self.dtype)

    def keys_and_values(self, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of `[num_parts, ..., head_dim]`."""
        return parts[0], parts[-1][..., : self.value_dim]


@dataclass(frozen=True, slots=True)
class _Rule:
    """How scores are computed, and which tokens a query attends to."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether the scores go through a softmax as they are."""
        return self.soft_cap is None and self.sinks is None

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        heads_shape: Sequence[int],
    ) -> torch.Tensor:
        """Attends over the last two axes: `[..., rows, dim]` over `[..., keys, dim]`.

        Args:
            query: `[..., rows, dim]`.
            keys: `[..., keys, dim]`, with the same number of leading axes.
            values: as `keys`.
            mask: bool, broadcasts to `[..., rows, keys]`. None, allowed if `is_plain`, lets row i
                attend to keys 0 to i.
            heads_shape: a shape of `[num_heads]` that broadcasts to `[..., rows, 1]`.
        """
        if self.is_plain:
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=mask is None, scale=self.scale
            )
        assert mask is not None
        scores = query.float() @ keys.transpose(-1, -2).float() * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(heads_shape).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : keys.shape[-2]]
        weights = weights.masked_fill(~mask, 0.0)  # NaN if a row attends to nothing
        return weights.to(values.dtype) @ values


def _attend_single_rows(
    query: torch.Tensor, cache: _Cache, meta: AttentionMetadata, rule: _Rule
) -> torch.Tensor:
    """Attends sequences of one query token each, padded to one length, in bounded batches."""
    num_kv_heads, block_size, head_dim = cache.kv_layer.shape[2:]
    # Not the longest of `context_lens`: reading that would wait for the device.
    num_columns = -(-meta.max_context_len // block_size)
    if rule.sliding_window is not None:
        num_columns = min(num_columns, (rule.sliding_window + block_size - 2) // block_size + 1)
    row_elements = max(1, num_columns) * block_size * 2 * num_kv_heads * head_dim
    rows_per_pass = max(1, _MAX_GATHERED_ELEMENTS // row_elements)
    passes = (
        _attend_padded(*part, cache, num_columns, rule)
        for part in zip(
            torch.split(query, rows_per_pass),
            torch.split(meta.block_tables, rows_per_pass),
            torch.split(meta.context_lens, rows_per_pass),
            strict=True,
        )
    )
    return torch.cat(tuple(passes))


def _attend_padded(
    query: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cache: _Cache,
    num_columns: int,
    rule: _Rule,
) -> torch.Tensor:
    """One masked attention over `num_columns` gathered blocks per sequence."""
    num_kv_heads, block_size, head_dim = cache.kv_layer.shape[2:]
    context = context_lens.long().unsqueeze(1)  # [seqs, 1]
    low = torch.zeros_like(context)  # first position seen
    if rule.sliding_window is not None:
        low = (context - rule.sliding_window).clamp(min=0)
    columns = low // block_size + torch.arange(num_columns, device=query.device)
    block_ids = block_tables.gather(1, columns.clamp(max=block_tables.shape[1] - 1))
    offsets = torch.arange(block_size, device=query.device)
    positions = (columns.unsqueeze(2) * block_size + offsets).flatten(1)  # [seqs, slots]
    seen = (positions >= low) & (positions < context)  # [seqs, slots]

    kv = cache.gather(block_ids.flatten())
    kv = kv.view(len(query), num_columns, *kv.shape[1:]).permute(2, 0, 3, 1, 4, 5)
    kv = kv.reshape(len(kv), len(query), num_kv_heads, -1, head_dim)
    # A score of -inf does not hide NaN: 0 * NaN is NaN. Masked values must be finite.
    kv = kv.masked_fill_(~seen[None, :, None, :, None], 0.0)
    grouped = query.view(len(query), num_kv_heads, -1, head_dim)  # [seqs, kv heads, group, dim]
    heads_shape = num_kv_heads, -1, 1
    keys, values = cache.keys_and_values(kv)
    output = rule.attend(grouped, keys, values, seen[:, None, None, :], heads_shape)
    return output.reshape(*query.shape[:2], -1)


def _attend_prompt(
    query: torch.Tensor, cache: _Cache, block_table: torch.Tensor, context_len: int, rule: _Rule
) -> torch.Tensor:
    """Attends one sequence's chunk of a prompt over its cached tokens and itself."""
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, block_size = cache.kv_layer.shape[2:4]
    start = context_len - query_len  # position of the first query
    low = 0 if rule.sliding_window is None else max(0, start - rule.sliding_window + 1)
    kv = cache.gather(block_table[low // block_size : -(-context_len // block_size)])
    kv = kv.permute(1, 2, 0, 3, 4)
    kv = kv.reshape(len(kv), num_kv_heads, 1, -1, head_dim)[:, :, :, low % block_size :]
    kv = kv[:, :, :, : context_len - low]

    group_size = num_heads // num_kv_heads
    grouped = query.view(query_len, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    kv = kv.expand(-1, -1, group_size, -1, -1)
    keys, values = cache.keys_and_values(kv)  # each [kv heads, group, keys, its dim]
    mask = None
    if start > 0 or rule.sliding_window is not None or not rule.is_plain:
        mask = _causal_mask(start, low, context_len, rule.sliding_window, query.device)
    output = rule.attend(grouped, keys, values, mask, (num_kv_heads, group_size, 1, 1))
    return output.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


def _causal_mask(
    start: int, low: int, stop: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor:
    """Returns `[queries, keys]`: the keys in `low..stop` seen by the queries in `start..stop`."""
    queries = torch.arange(start, stop, device=device).unsqueeze(1)
    distances = queries - torch.arange(low, stop, device=device)
    mask = distances >= 0
    if sliding_window is not None:
        mask &= distances < sliding_window
    return mask
