"""Every primitive in plain torch: the oracle that faster kernels are tested against.

Runs on any device and in any floating dtype. Sums that decide accuracy are
done in float32. Block ids and slots are trusted: whoever schedules checks them.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from kernels.attention_metadata import AttentionMetadata
from kernels.recorded_step import Arena, RecordedStep
from kernels.rotary import QkNorms, Rotation
from kernels.weights import DenseWeight, Weight, WeightUse

__all__ = [
    "copy_blocks",
    "embed",
    "gather_blocks",
    "linear",
    "linear_silu_and_mul",
    "make_weight",
    "paged_attention",
    "point_to",
    "record_step",
    "rms_norm",
    "rotary_angles",
    "rotate_and_write_kv",
    "row_maxima",
    "scatter_blocks",
    "swap_blocks",
    "take_rows",
]

# The most K and V elements that decode rows gather at once; bounds the memory of one step.
_MAX_GATHERED_ELEMENTS = 1 << 24


def make_weight(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    use: WeightUse,
) -> Weight:
    """Memory for a weight, to be filled through `Weight.rows`.

    Args:
        num_rows: outputs.
        num_columns: inputs.
        dtype: of its elements.
        device: where it is.
        use: what it is for.
    """
    data = torch.empty((num_rows, num_columns), dtype=dtype, device=device)
    return DenseWeight(num_rows, num_columns, use, data)


def embed(token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Rows of an embedding: `[num_tokens]` int64 to `[num_tokens, num_columns]`."""
    return F.embedding(token_ids, _dense(weight))


def take_rows(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of a matrix, as a matrix of their own: `matrix[rows]`.

    Args:
        matrix: `[num_rows, num_columns]`, any strides.
        rows: `[n]` int64.

    Returns:
        `[n, num_columns]`, contiguous.
    """
    return matrix.index_select(0, rows)


def linear(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`hidden @ weight.T + bias + residual`.

    Args:
        hidden: `[rows, num_columns]`.
        weight: for this use.
        bias: `[num_rows]`.
        residual: `[rows, num_rows]`.
        out_dtype: of the result; None: of `hidden`.

    Returns:
        `[rows, num_rows]`.
    """
    out = F.linear(hidden, _dense(weight), bias)
    if residual is not None:
        out = residual + out
    return out if out_dtype is None else out.to(out_dtype)


def linear_silu_and_mul(
    hidden: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`silu(hidden @ gate.T) * (hidden @ up.T)`.

    Args:
        hidden: `[rows, num_columns]`.
        weight: for this use: `gate` above `up`.
        bias: `[num_rows]`, of both.

    Returns:
        `[rows, num_rows / 2]`.
    """
    return silu_and_mul(F.linear(hidden, _dense(weight), bias))


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float) -> Rotation:
    """Cosines and sines of each position's angles, times `amplitude` (arXiv:2104.09864).

    Args:
        positions: `[num_tokens]` int64.
        frequencies: `[head_dim / 2]` float32, radians per position.
        amplitude: 1, or what a scaling for long contexts wants.
    """
    angles = positions.unsqueeze(1).float() * frequencies
    return Rotation(angles.cos() * amplitude, angles.sin() * amplitude)


def rotate_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    rotation: Rotation | None = None,
    norms: QkNorms | None = None,
) -> torch.Tensor:
    """Prepares a step for attention: norms and turns Q and K, and writes K and V to their slots.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; its memory may be reused for the result.
        key: `[num_tokens, num_kv_heads, head_dim]`; is undefined afterwards.
        value: `[num_tokens, num_kv_heads, head_dim]`.
        kv_layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, any strides.
        meta: `slot_mapping` says where K and V go.
        rotation: None: positions are not the heads' matter.
        norms: None for none.

    Returns:
        The query that attends, `[num_tokens, num_heads, head_dim]`.
    """
    if norms is not None:
        query = rms_norm(query, norms.query_weight, norms.eps)
        key = rms_norm(key, norms.key_weight, norms.eps)
    if rotation is not None:
        cos, sin = rotation.cos.to(query.dtype), rotation.sin.to(query.dtype)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
    write_kv(key, value, kv_layer, meta.slot_mapping)
    return query


def record_step(
    device: torch.device, arena: Arena, run: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, RecordedStep | None]:
    """Runs a step and, where the device's kernels can, records it.

    What the kernels give to `run` may be unset memory: a recorded step computes afterwards.

    Args:
        device: of the step.
        arena: of the recorded step.
        run: computes the step from tensors that stay where they are, and that the caller keeps
            for as long as the step. Is called again where the step cannot be recorded.

    Returns:
        The result, and the step, to be run again; None where steps are not recorded.
    """
    return run(), None


def point_to(recorded: AttentionMetadata, current: AttentionMetadata) -> None:
    """Makes steps recorded with `recorded` read the tensors of `current`, of as many tokens."""
    raise NotImplementedError("the reference records no steps")


def row_maxima(
    logits: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest value, NaN for a row that holds one, and its first index.

    Args:
        logits: `[rows, vocab]` float32.
        out: what to write both to, and return; of a recorded step it stays where it is.

    Returns:
        `[rows]` float32 and `[rows]` int64: -1 where the value is not finite.
    """
    maxima, indices = torch.max(logits, dim=-1, out=out)
    indices.masked_fill_(~maxima.isfinite(), -1)
    return maxima, indices


def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes each token's K and V into its slot of one layer's cache.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`.
        value: as `key`.
        kv_layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, any strides.
        slot_mapping: `[num_tokens]` int64, `block_id * block_size + offset`, all different.
    """
    block_size = kv_layer.shape[3]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_layer[block_ids, 0, :, offsets] = key
    kv_layer[block_ids, 1, :, offsets] = value


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal grouped-query attention of each query token over its sequence's cached KV.

    The step's own K and V must have been written already. Slots past a
    context, or before its window, may hold anything, NaN included. A sequence
    with an empty context yields zeros.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, sequences end to end.
        kv_layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, any strides.
        meta: which rows belong to which sequence, and where its blocks are.
        scale: factor on the scores.
        sliding_window: how many tokens a query sees, itself included; None for all.

    Returns:
        As `query`.
    """
    if meta.max_query_len == 1:
        return _attend_single_rows(
            query, kv_layer, meta.block_tables, meta.context_lens, scale, sliding_window
        )
    output = torch.empty_like(query)
    starts, contexts = meta.query_starts.tolist(), meta.context_lens.tolist()
    single_sequences = []
    for index, context_len in enumerate(contexts):
        rows = slice(starts[index], starts[index + 1])
        if rows.stop - rows.start == 1:
            single_sequences.append(index)
            continue
        output[rows] = _attend_prompt(
            query[rows], kv_layer, meta.block_tables[index], context_len, scale, sliding_window
        )
    if single_sequences:
        chosen = torch.tensor(single_sequences, device=query.device)
        row_ids = meta.query_starts[chosen]
        output[row_ids] = _attend_single_rows(
            query[row_ids],
            kv_layer,
            meta.block_tables[chosen],
            meta.context_lens[chosen],
            scale,
            sliding_window,
        )
    return output


def gather_blocks(
    pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, out: torch.Tensor
) -> None:
    """Copies blocks out of the pool: `out[i] = pool[block_ids[i]]`.

    Args:
        pool: `[num_blocks, ...]`, contiguous.
        block_ids: `[n]`.
        out: `[n, block_elements]` of the pool's dtype or `[n, block_bytes]`
            uint8, contiguous, aligned to 4 bytes, on any device.
    """
    rows, ids = _block_words(pool), _as_index(block_ids, pool)
    target = _block_words(out)
    if out.device == pool.device:
        torch.index_select(rows, 0, ids, out=target)
    else:
        target.copy_(rows.index_select(0, ids))


def scatter_blocks(
    source: torch.Tensor, pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor
) -> None:
    """Copies blocks into the pool: `pool[block_ids[i]] = source[i]`.

    Args:
        source: as `out` of `gather_blocks`.
        pool: `[num_blocks, ...]`, contiguous.
        block_ids: `[n]`, all different.
    """
    ids = _as_index(block_ids, pool)
    _block_words(pool).index_copy_(0, ids, _block_words(source).to(pool.device))


def copy_blocks(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks within the pool, all sources read before any target is written.

    Args:
        pool: `[num_blocks, ...]`, contiguous.
        pairs: (source, target) block ids; targets all different.
    """
    if not pairs:
        return
    rows = _block_words(pool)
    sources, targets = zip(*pairs, strict=True)
    rows.index_copy_(0, _as_index(targets, pool), rows.index_select(0, _as_index(sources, pool)))


def swap_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copies blocks from one pool to another, on any two devices: `target[t] = source[s]`.

    Each block is one transfer. Between a GPU and pinned memory it does not wait
    for the device: later work of the device's stream sees the copies, the host
    only once it has waited.

    Args:
        source: `[num_blocks, ...]`, contiguous.
        target: as `source`, of another number of blocks.
        pairs: (block id in `source`, block id in `target`), the latter all different.
    """
    for source_id, target_id in pairs:
        target[target_id].copy_(source[source_id], non_blocking=True)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`hidden / sqrt(mean(hidden^2) + eps) * weight` over the last axis (arXiv:1910.07467).

    Args:
        hidden: `[..., size]`.
        weight: `[size]`.
        eps: added to the mean of squares.
    """
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each head's halves by the token's angles (arXiv:2104.09864, half-split pairs).

    Args:
        states: `[num_tokens, num_heads, head_dim]`.
        cos: `[num_tokens, head_dim / 2]`, of the dtype of `states`.
        sin: as `cos`.
    """
    first, second = states.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, with gate and up side by side: `[..., 2 * size] -> [..., size]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, DenseWeight)
    return weight.data


def _attend_single_rows(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Sequences of one query token each, padded to one length, a bounded number at a time."""
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    num_columns = -(-int(context_lens.max()) // block_size)
    if sliding_window is not None:
        num_columns = min(num_columns, (sliding_window + block_size - 2) // block_size + 1)
    row_elements = max(1, num_columns) * block_size * 2 * num_kv_heads * head_dim
    rows_per_pass = max(1, _MAX_GATHERED_ELEMENTS // row_elements)
    passes = (
        _attend_padded(*part, kv_layer, num_columns, scale, sliding_window)
        for part in zip(
            torch.split(query, rows_per_pass),
            torch.split(block_tables, rows_per_pass),
            torch.split(context_lens, rows_per_pass),
            strict=True,
        )
    )
    return torch.cat(tuple(passes))


def _attend_padded(
    query: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    kv_layer: torch.Tensor,
    num_columns: int,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """One masked attention over `num_columns` gathered blocks per sequence."""
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    context = context_lens.long().unsqueeze(1)  # [seqs, 1]
    low = torch.zeros_like(context)  # first position seen
    if sliding_window is not None:
        low = (context - sliding_window).clamp(min=0)
    columns = low // block_size + torch.arange(num_columns, device=query.device)
    block_ids = block_tables.gather(1, columns.clamp(max=block_tables.shape[1] - 1))
    offsets = torch.arange(block_size, device=query.device)
    positions = (columns.unsqueeze(2) * block_size + offsets).flatten(1)  # [seqs, slots]
    seen = (positions >= low) & (positions < context)  # [seqs, slots]

    kv = kv_layer.index_select(0, block_ids.flatten())
    kv = kv.view(len(query), num_columns, *kv_layer.shape[1:]).permute(2, 0, 3, 1, 4, 5)
    kv = kv.reshape(2, len(query), num_kv_heads, -1, head_dim)
    # A score of -inf does not hide NaN: 0 * NaN is NaN. What is not seen must be finite.
    kv = kv.masked_fill_(~seen[None, :, None, :, None], 0.0)
    grouped = query.view(len(query), num_kv_heads, -1, head_dim)  # [seqs, kv heads, group, dim]
    mask = seen[:, None, None, :]
    output = F.scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=mask, scale=scale)
    return output.reshape(query.shape)


def _attend_prompt(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,
    context_len: int,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """One sequence's chunk of prompt, over what is cached and itself."""
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    start = context_len - query_len  # position of the first query
    low = 0 if sliding_window is None else max(0, start - sliding_window + 1)
    block_ids = block_table[low // block_size : -(-context_len // block_size)]
    kv = kv_layer.index_select(0, block_ids).permute(1, 2, 0, 3, 4)
    kv = kv.reshape(2, num_kv_heads, 1, -1, head_dim)[:, :, :, low % block_size :]
    kv = kv[:, :, :, : context_len - low]

    group_size = num_heads // num_kv_heads
    grouped = query.view(query_len, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    keys, values = kv.expand(-1, -1, group_size, -1, -1)  # each [kv heads, group, keys, dim]
    if start == 0 and (sliding_window is None or sliding_window >= context_len):
        output = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
    else:
        mask = _causal_mask(start, low, context_len, sliding_window, query.device)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return output.permute(2, 0, 1, 3).reshape(query.shape)


def _causal_mask(
    start: int, low: int, stop: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor:
    """`[queries, keys]`: which keys in `low..stop` the queries at `start..stop` see."""
    queries = torch.arange(start, stop, device=device).unsqueeze(1)
    distances = queries - torch.arange(low, stop, device=device)
    mask = distances >= 0
    if sliding_window is not None:
        mask &= distances < sliding_window
    return mask


def _block_words(tensor: torch.Tensor) -> torch.Tensor:
    """`[num_blocks, block_words]` int32, without a copy.

    Words make copies of narrow dtypes as fast as wide ones. K and V side by
    side make every block a whole number of them.
    """
    return tensor.view(len(tensor), -1).view(torch.int32)


def _as_index(block_ids: Sequence[int] | torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(block_ids, dtype=torch.int64, device=pool.device)
