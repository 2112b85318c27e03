"""Paged attention in Triton: the kernel; `kernels.triton.attention` launches it.

The *rows* of a sequence are its query tokens times the heads that share a KV head: row r is token
`r // group_size`, head `r % group_size` of the group. A program attends a *block* of rows,
which reads each cached K and V once. One kernel serves prompts and decoding: they differ in the
rows of a block, and in the number of *splits*, programs that share a context.
"""

import math

import triton
import triton.language as tl

from kernels.triton.attention_splits import divide_context, locate_block

__all__ = ["LOG2_E", "attend_kernel", "attend_rows", "product"]

LOG2_E = tl.constexpr(math.log2(math.e))
# The interpreter has no matrix products of bfloat16; products of widened operands are the same.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# Arguments that change from step to step must not cause another compilation.
@triton.jit(
    do_not_specialize=[
        "window",
        "group_size",
        "num_seqs",
        "min_rows",
        "max_rows",
        "rows_per_block",
        "min_tokens_per_split",
        "table_stride",
    ],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "context_lens"],
)
def attend_kernel(
    query,
    kv_layer,
    kv_scales,
    sinks,
    block_tables,
    query_starts,
    context_lens,
    output,
    partials,
    log_sums,
    score_factor,
    cap_factor,
    window,
    group_size,
    num_seqs,
    min_rows,
    max_rows,
    rows_per_block,
    min_tokens_per_split,
    query_token_stride,
    query_head_stride,
    table_stride,
    kv_block_stride,
    kv_kind_stride,
    kv_head_stride,
    kv_slot_stride,
    scale_block_stride,
    scale_kind_stride,
    scale_head_stride,
    scale_slot_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    PADDED_REST: tl.constexpr,
    IS_LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_MANY_BLOCKS: tl.constexpr,
    HAS_FULL_TILES: tl.constexpr,
):
    """Computes `softmax(score(query @ K^T)) @ V` of one block of rows over one split of its keys.

    Program (i, j, k) attends block i of rows with KV head j to split k, in sequences of
    `min_rows` to `max_rows` rows. With HAS_MANY_BLOCKS the blocks of all sequences are numbered
    consecutively, the last first; otherwise i is the sequence, which has one block.

    The result of a block with one split is written to `output`; with several splits, partial
    results are written to the tensors of `Splits`, which have `rows_per_block` rows for the block.

    HEAD_DIM: elements of a value. A key has REST_DIM more.
    IS_LATENT: a value is the first elements of the key, and is loaded with it.
    HAS_FULL_TILES: there is no sliding window, so tiles that all rows attend to need no mask.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    if HAS_MANY_BLOCKS:
        # The end of a prompt attends to the most keys, so it starts first.
        block = tl.num_programs(0) - 1 - block
    sequence, first_row, query_start, query_len = locate_block(
        block, query_starts, num_seqs, group_size, BLOCK_M, HAS_MANY_BLOCKS
    )
    num_rows = query_len * group_size
    if (first_row >= num_rows) | (num_rows < min_rows) | (num_rows > max_rows):
        return

    num_before = tl.load(context_lens + sequence) - query_len
    low, high, per_split, num_used_splits = divide_context(
        first_row, num_rows, num_before, group_size, window,
        num_splits, min_tokens_per_split, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if split >= num_used_splits:
        return
    begin = low // BLOCK_N * BLOCK_N + split * per_split
    end = tl.minimum(begin + per_split, high)

    part = (block.to(tl.int64) * tl.num_programs(1) + kv_head) * rows_per_block * num_splits + split
    attend_rows(
        query, kv_layer, kv_scales, sinks, block_tables, output, partials, log_sums,
        score_factor, cap_factor, window, group_size, tl.num_programs(1),
        sequence, kv_head, first_row, num_rows, query_start, num_before, low, begin, end,
        split == 0, num_used_splits == 1, part, num_splits,
        query_token_stride, query_head_stride,
        table_stride, kv_block_stride, kv_kind_stride, kv_head_stride, kv_slot_stride,
        scale_block_stride, scale_kind_stride, scale_head_stride, scale_slot_stride,
        HEAD_DIM, PADDED_DIM, REST_DIM, PADDED_REST, IS_LATENT, BLOCK_SIZE, BLOCK_M, BLOCK_N,
        HAS_SOFT_CAP, HAS_FULL_TILES,
    )  # fmt: skip


@triton.jit
def attend_rows(
    query,
    kv_layer,
    kv_scales,
    sinks,
    block_tables,
    output,
    partials,
    log_sums,
    score_factor,
    cap_factor,
    window,
    group_size,
    num_kv_heads,
    sequence,
    kv_head,
    first_row,
    num_rows,
    query_start,
    num_before,
    low,
    begin,
    end,
    has_sinks,
    is_whole,
    first_part,
    part_stride,
    query_token_stride,
    query_head_stride,
    table_stride,
    kv_block_stride,
    kv_kind_stride,
    kv_head_stride,
    kv_slot_stride,
    scale_block_stride,
    scale_kind_stride,
    scale_head_stride,
    scale_slot_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    PADDED_REST: tl.constexpr,
    IS_LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_FULL_TILES: tl.constexpr,
):
    """Attends a block of a sequence's rows with one KV head to the keys `begin` to `end`.

    The result is written to `output` if the range `is_whole`; else partial results are written, of
    row i to the place `first_part + i * part_stride`. The part that `has_sinks` counts them.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    tokens = rows // group_size
    heads = kv_head * group_size + rows % group_size
    is_row = rows < num_rows
    is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = (query_start + tokens).to(tl.int64) * query_token_stride
    query_offsets += heads.to(tl.int64) * query_head_stride
    queries = tl.load(query + query_offsets[:, None] + dims[None, :], mask=is_element, other=0.0)
    rest_queries = queries  # not used
    if REST_DIM > 0:
        rest = tl.arange(0, PADDED_REST)
        is_rest = is_row[:, None] & (rest < REST_DIM)[None, :]
        rest_offsets = query_offsets[:, None] + HEAD_DIM + rest[None, :]
        rest_queries = tl.load(query + rest_offsets, mask=is_rest, other=0.0)

    results = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks is not None:
        # A sink's weight relative to itself is 1, and it adds nothing to the results.
        has_sink = rows < tl.where(has_sinks, num_rows, 0)
        maxima = tl.load(sinks + heads, mask=has_sink, other=float("-inf")).to(tl.float32) * LOG2_E
        sums = tl.where(has_sink, 1.0, 0.0)
    if HAS_FULL_TILES:
        first_position = num_before + first_row // group_size
        full_end = tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end)
        full_end = tl.maximum(full_end, begin)
        results, sums, maxima = _attend_tiles(
            results, sums, maxima, queries, rest_queries, num_before + tokens, begin, full_end,
            low, window,
            kv_layer, kv_scales, block_tables, sequence, kv_head, score_factor, cap_factor,
            table_stride, kv_block_stride, kv_kind_stride, kv_head_stride, kv_slot_stride,
            scale_block_stride, scale_kind_stride, scale_head_stride, scale_slot_stride,
            HEAD_DIM, PADDED_DIM, REST_DIM, PADDED_REST, IS_LATENT, BLOCK_SIZE, BLOCK_N,
            HAS_SOFT_CAP, False,
        )  # fmt: skip
        begin = full_end
    results, sums, maxima = _attend_tiles(
        results, sums, maxima, queries, rest_queries, num_before + tokens, begin, end, low, window,
        kv_layer, kv_scales, block_tables, sequence, kv_head, score_factor, cap_factor,
        table_stride, kv_block_stride, kv_kind_stride, kv_head_stride, kv_slot_stride,
        scale_block_stride, scale_kind_stride, scale_head_stride, scale_slot_stride,
        HEAD_DIM, PADDED_DIM, REST_DIM, PADDED_REST, IS_LATENT, BLOCK_SIZE, BLOCK_N,
        HAS_SOFT_CAP, True,
    )  # fmt: skip

    # A row that attends to nothing has a sum of 0, and results of 0.
    sums = tl.where(sums == 0.0, 1.0, sums)
    results /= sums[:, None]
    if is_whole:
        num_heads = num_kv_heads * group_size
        out_rows = (query_start + tokens).to(tl.int64) * num_heads + heads
        out_offsets = out_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(output + out_offsets, results.to(output.dtype.element_ty), mask=is_element)
    else:
        parts = first_part + tl.arange(0, BLOCK_M) * part_stride
        tl.store(partials + parts[:, None] * HEAD_DIM + dims[None, :], results, mask=is_element)
        tl.store(log_sums + parts, maxima + tl.log2(sums), mask=is_row)


@triton.jit
def _attend_tiles(
    results,
    sums,
    maxima,
    queries,
    rest_queries,
    positions,
    begin,
    end,
    low,
    window,
    kv_layer,
    kv_scales,
    block_tables,
    sequence,
    kv_head,
    score_factor,
    cap_factor,
    table_stride,
    kv_block_stride,
    kv_kind_stride,
    kv_head_stride,
    kv_slot_stride,
    scale_block_stride,
    scale_kind_stride,
    scale_head_stride,
    scale_slot_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    PADDED_REST: tl.constexpr,
    IS_LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Continues the softmax of a block of rows over the keys `begin` to `end`.

    The softmax is updated tile by tile (Milakov and Gimelshein, arXiv:1805.02867), in powers of 2:
    `results` and `sums` are relative to `2 ** maxima`. Keys outside of the range may be NaN.
    """
    table = block_tables + sequence.to(tl.int64) * table_stride
    keys = kv_layer + kv_head.to(tl.int64) * kv_head_stride
    dims = tl.arange(0, PADDED_DIM)
    # Weights times scales may be too small for float16.
    is_too_narrow: tl.constexpr = kv_scales is not None and queries.dtype == tl.float16
    weight_type: tl.constexpr = tl.bfloat16 if is_too_narrow else queries.dtype
    for tile in range(begin, end, BLOCK_N):
        tile_positions = tile + tl.arange(0, BLOCK_N)
        is_read = (tile_positions >= low) & (tile_positions < end)
        block_ids = tl.load(table + tile_positions // BLOCK_SIZE, mask=is_read, other=0)
        block_ids = block_ids.to(tl.int64)
        slots = (tile_positions % BLOCK_SIZE).to(tl.int64)
        is_element = is_read[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = block_ids * kv_block_stride + slots * kv_slot_stride
        pointers = keys + offsets[:, None] + dims[None, :]
        key = tl.load(pointers, mask=is_element, other=0.0)
        value = key
        if not IS_LATENT:
            value = tl.load(pointers + kv_kind_stride, mask=is_element, other=0.0)

        key = tl.trans(_widened(key, queries.dtype))
        scores = tl.full([queries.shape[0], BLOCK_N], 0.0, tl.float32)
        scores = product(queries, key, scores)
        if REST_DIM > 0:
            rest = tl.arange(0, PADDED_REST)
            is_rest = is_read[:, None] & (rest < REST_DIM)[None, :]
            rest_pointers = keys + offsets[:, None] + HEAD_DIM + rest[None, :]
            rest_key = tl.load(rest_pointers, mask=is_rest, other=0.0)
            rest_key = tl.trans(_widened(rest_key, queries.dtype))
            scores = product(rest_queries, rest_key, scores)
        scores *= score_factor
        if kv_scales is not None:
            scale_pointers = kv_scales + kv_head.to(tl.int64) * scale_head_stride
            scale_pointers += block_ids * scale_block_stride + slots * scale_slot_stride
            scores *= tl.load(scale_pointers, mask=is_read, other=0.0)[None, :]
        if HAS_SOFT_CAP:
            # tanh(|x|) = (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)), and nothing overflows.
            powers = tl.exp2(-tl.abs(scores))
            capped = cap_factor * ((1.0 - powers) / (1.0 + powers))
            scores = tl.where(scores < 0.0, -capped, capped)
        if IS_MASKED:
            distances = positions[:, None] - tile_positions[None, :]
            scores = tl.where((distances >= 0) & (distances < window), scores, float("-inf"))

        new_maxima = tl.maximum(maxima, tl.max(scores, 1))
        # For a row without keys so far, -inf - -inf would be NaN.
        shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(maxima - shift)
        sums = sums * decay + tl.sum(weights, 1)
        if kv_scales is not None:
            weights *= tl.load(scale_pointers + scale_kind_stride, mask=is_read, other=0.0)[None, :]
        value = _widened(value, weight_type)
        results = product(weights.to(weight_type), value, results * decay[:, None])
        maxima = new_maxima
    return results, sums, maxima


# Four e4m3 numbers to bfloat16, which the hardware converts one by one through float16. The bits
# are moved to their places, with copies of the sign above them, and masked. The factor 2^120 is the
# difference of the biases; subnormal numbers are exact too. NaN becomes 480: caches have none.
_BFLOAT16_OF_E4M3 = tl.constexpr("""{
.reg .b32 first, second, factor, addend;
prmt.b32 first, $2, 0, 0x9180;
prmt.b32 second, $2, 0, 0xb3a2;
shl.b32 first, first, 4;
shl.b32 second, second, 4;
and.b32 first, first, 0x87f087f0;
and.b32 second, second, 0x87f087f0;
mov.b32 factor, 0x7b807b80;
mov.b32 addend, 0x80008000;
fma.rn.bf16x2 $0, first, factor, addend;
fma.rn.bf16x2 $1, second, factor, addend;
}""")


@triton.jit
def _widened(states, dtype: tl.constexpr):
    """Converts K or V to the type of an operand, which holds all 8-bit elements."""
    if states.dtype == tl.int8:
        states = states.to(tl.float32)
    elif states.dtype == tl.float8e4nv and dtype == tl.bfloat16 and not _IS_INTERPRETED:
        return tl.inline_asm_elementwise(
            _BFLOAT16_OF_E4M3, "=r,=r,r", [states], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return states.to(dtype)


@triton.jit
def product(left, right, addend):
    """Computes `left @ right + addend` in float32."""
    if _IS_INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, addend, input_precision="ieee")
