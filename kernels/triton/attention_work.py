"""Paged attention in Triton: a list of work that gives every program the same number of tiles.

The contexts of a step lie on one line, in tiles of `block_n` tokens: all sequences' of the first KV
head, then all of the second, and so on. Program p attends tiles `p * share` to `(p + 1) * share` of
it, of as many contexts as lie there. So one long context among many short ones is read by many
programs, and none waits for a second wave. Where the contexts lie is computed on the device from
their lengths, once for all layers of a step; the number of programs is the host's, as graphs need.

A context that begins and ends in different programs is combined from their partial results. A
program has at most two of these: of its first context, which began in an earlier one, and of its
last, which goes on in a later one.

This follows the tile schedulers of Stream-K (Osama et al., arXiv:2301.03598) and FlashInfer.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

from kernels.paged_kv import AttentionMetadata
from kernels.triton.attention_kernels import attend_rows
from kernels.triton.attention_plan import Pass, padded_dim
from kernels.triton.attention_splits import find_span

__all__ = ["SharedWork", "attend_shares_kernel"]

_SEQUENCES = 512  # that a program looks at together
_PARTS = 16  # partial results that a program adds together
# The words of a list: these numbers, each program's first context, the first tile of every
# sequence of a head and the end of the last, and the sequences' indices.
_TOTAL = tl.constexpr(0)
_CONTEXTS = tl.constexpr(1)
_SHARE = tl.constexpr(2)
_HEADER = tl.constexpr(4)

_lists: WeakKeyDictionary[AttentionMetadata, dict[tuple[object, ...], torch.Tensor]] = (
    WeakKeyDictionary()
)
"""Lists by the metadata that they were made from: metadata lives no longer than a step."""


@dataclass(frozen=True, slots=True)
class SharedWork:
    """The list of a pass, and memory for partial results.

    Attributes:
        words: the list, int32.
        partials: `[num_programs, 2, rows_per_block, value_dim]` float32, the result of each
            program's first context and of its last.
        log_sums: `[num_programs, 2, rows_per_block]` float32, log2 of the sums of their weights.
    """

    words: torch.Tensor
    partials: torch.Tensor
    log_sums: torch.Tensor

    @classmethod
    def for_pass(
        cls, part: Pass, meta: AttentionMetadata, window: int, group_size: int, output: torch.Tensor
    ) -> "SharedWork":
        """Returns the list, made if no layer before has, and uninitialized memory.

        Args:
            part: the pass.
            meta: the step's sequences.
            window: the number of tokens a query attends to.
            group_size: query heads per KV head.
            output: `[num_tokens, num_heads, value_dim]`.
        """
        lists = _lists.setdefault(meta, {})
        key = (part, window, group_size)
        if key not in lists:
            lists[key] = _lay_out(part, meta, window, group_size)
        rows, device = part.num_partial_rows, output.device
        return cls(
            lists[key],
            torch.empty((rows, output.shape[2]), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    def combine(self, part: Pass, meta: AttentionMetadata, output: torch.Tensor) -> None:
        """Writes combined results to `output`, `[num_tokens, num_heads, value_dim]` contiguous."""
        num_heads, head_dim = output.shape[1:]
        _combine_shares_kernel[(part.num_blocks, part.num_kv_heads, part.rows_per_block)](
            self.partials,
            self.log_sums,
            meta.query_starts,
            self.words,
            output,
            num_heads // part.num_kv_heads,
            part.num_programs,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim(head_dim),
            PARTS=_PARTS,
        )


def _lay_out(part: Pass, meta: AttentionMetadata, window: int, group_size: int) -> torch.Tensor:
    """Launches what makes a list."""
    num_words = _HEADER.value + part.num_programs + 2 * part.num_blocks + 1
    words = torch.empty(num_words, dtype=torch.int32, device=meta.context_lens.device)
    _lay_out_shares_kernel[(part.num_programs,)](
        meta.query_starts,
        meta.context_lens,
        words,
        part.num_blocks,
        part.num_kv_heads,
        group_size,
        window,
        part.min_rows,
        part.max_rows,
        triton.cdiv(part.min_tokens_per_split, part.block_n),
        part.block_m,
        part.block_n,
        SEQUENCES=_SEQUENCES,
    )
    return words


# One compiled version serves all passes.
@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "num_kv_heads",
        "group_size",
        "window",
        "min_rows",
        "max_rows",
        "min_share",
        "block_m",
        "block_n",
    ],
    do_not_specialize_on_alignment=["query_starts", "context_lens"],
)
def _lay_out_shares_kernel(
    query_starts,
    context_lens,
    words,
    num_seqs,
    num_kv_heads,
    group_size,
    window,
    min_rows,
    max_rows,
    min_share,
    block_m,
    block_n,
    SEQUENCES: tl.constexpr,
):
    """Makes the list of the sequences of `min_rows` to `max_rows` rows, which have one block each.

    Program p finds where program p of the attention begins; the first one writes the rest too.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    total = program * 0
    num_contexts = program * 0
    for first in range(0, num_seqs, SEQUENCES):
        tiles = _tiles(
            first + tl.arange(0, SEQUENCES), query_starts, context_lens, num_seqs, group_size,
            window, min_rows, max_rows, block_m, block_n,
        )  # fmt: skip
        total += tl.sum(tiles, 0)
        num_contexts += tl.sum((tiles > 0).to(tl.int32), 0)
    line = total.to(tl.int64) * num_kv_heads
    share = tl.maximum(tl.cdiv(line, num_programs), min_share)
    kv_head = program * share // tl.maximum(total, 1)
    place = program * share - kv_head * total

    starts = words + _HEADER + num_programs
    num_tiles_before = program * 0
    num_before = program * 0
    num_passed = program * 0
    for first in range(0, num_seqs, SEQUENCES):
        sequences = first + tl.arange(0, SEQUENCES)
        tiles = _tiles(
            sequences, query_starts, context_lens, num_seqs, group_size,
            window, min_rows, max_rows, block_m, block_n,
        )  # fmt: skip
        is_context = tiles > 0
        ends = num_tiles_before + tl.cumsum(tiles, 0)
        num_passed += tl.sum((is_context & (ends <= place)).to(tl.int32), 0)
        if program == 0:
            ranks = num_before + tl.cumsum(is_context.to(tl.int32), 0) - 1
            tl.store(starts + ranks, ends - tiles, mask=is_context)
            tl.store(starts + num_seqs + 1 + ranks, sequences, mask=is_context)
        num_tiles_before += tl.sum(tiles, 0)
        num_before += tl.sum(is_context.to(tl.int32), 0)
    context = kv_head * num_contexts + num_passed
    tl.store(words + _HEADER + program, context.to(tl.int32))
    if program == 0:
        tl.store(words + _TOTAL, total)
        tl.store(words + _CONTEXTS, num_contexts)
        tl.store(words + _SHARE, share.to(tl.int32))
        tl.store(starts + num_contexts, total)


@triton.jit
def _tiles(
    sequences,
    query_starts,
    context_lens,
    num_seqs,
    group_size,
    window,
    min_rows,
    max_rows,
    block_m,
    block_n,
):
    """Returns the tiles that sequences' rows attend to; at least one, or 0 for other sequences."""
    is_sequence = sequences < num_seqs
    query_len = tl.load(query_starts + sequences + 1, mask=is_sequence, other=0)
    query_len -= tl.load(query_starts + sequences, mask=is_sequence, other=0)
    num_rows = query_len * group_size
    num_before = tl.load(context_lens + sequences, mask=is_sequence, other=0) - query_len
    low, high = find_span(sequences * 0, num_rows, num_before, group_size, window, block_m)
    num_tiles = tl.maximum(tl.cdiv(high - low // block_n * block_n, block_n), 1)
    is_attended = (num_rows > 0) & (num_rows >= min_rows) & (num_rows <= max_rows)
    return tl.where(is_attended, num_tiles, 0)


# Arguments that change from step to step must not cause another compilation.
@triton.jit(
    do_not_specialize=[
        "window",
        "group_size",
        "num_seqs",
        "num_kv_heads",
        "rows_per_block",
        "table_stride",
    ],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "context_lens"],
)
def attend_shares_kernel(
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
    words,
    num_kv_heads,
    rows_per_block,
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
):
    """Computes `softmax(score(query @ K^T)) @ V` of the rows of a list's sequences.

    Program p attends the tiles of its share, one context after the other. The result of a context
    that lies in its share is written to `output`; else a partial one is written to the tensors of
    `SharedWork`.

    HEAD_DIM, IS_LATENT: as in `attend_kernel`.
    """
    program = tl.program_id(0)
    total = tl.load(words + _TOTAL)
    num_contexts = tl.load(words + _CONTEXTS)
    share = tl.load(words + _SHARE).to(tl.int64)
    context = tl.load(words + _HEADER + program)
    starts = words + _HEADER + tl.num_programs(0)
    place = program * share
    end_place = tl.minimum(place + share, total.to(tl.int64) * num_kv_heads)
    while place < end_place:
        kv_head = context // num_contexts
        rank = context - kv_head * num_contexts
        start = tl.load(starts + rank)
        num_tiles = tl.load(starts + rank + 1) - start
        sequence = tl.load(starts + num_seqs + 1 + rank)
        context_place = kv_head.to(tl.int64) * total + start
        first_tile = (place - context_place).to(tl.int32)
        end_tile = tl.minimum(end_place - context_place, num_tiles).to(tl.int32)

        query_start = tl.load(query_starts + sequence)
        query_len = tl.load(query_starts + sequence + 1) - query_start
        num_rows = query_len * group_size
        num_before = tl.load(context_lens + sequence) - query_len
        first_row = sequence * 0
        low, high = find_span(first_row, num_rows, num_before, group_size, window, BLOCK_M)
        begin = (low // BLOCK_N + first_tile) * BLOCK_N
        end = tl.minimum((low // BLOCK_N + end_tile) * BLOCK_N, high)
        is_first = first_tile == 0
        part = program.to(tl.int64) * 2 + is_first.to(tl.int32)
        attend_rows(
            query, kv_layer, kv_scales, sinks, block_tables, output, partials, log_sums,
            score_factor, cap_factor, window, group_size, num_kv_heads,
            sequence, kv_head, first_row, num_rows, query_start, num_before, low, begin, end,
            is_first, is_first & (end_tile == num_tiles), part * rows_per_block, 1,
            query_token_stride, query_head_stride,
            table_stride, kv_block_stride, kv_kind_stride, kv_head_stride, kv_slot_stride,
            scale_block_stride, scale_kind_stride, scale_head_stride, scale_slot_stride,
            HEAD_DIM, PADDED_DIM, REST_DIM, PADDED_REST, IS_LATENT, BLOCK_SIZE, BLOCK_M, BLOCK_N,
            HAS_SOFT_CAP, False,
        )  # fmt: skip
        place = context_place + end_tile
        context += 1


# One compiled version serves all passes.
@triton.jit(
    do_not_specialize=["group_size", "num_programs"],
    do_not_specialize_on_alignment=["query_starts"],
)
def _combine_shares_kernel(
    partials,
    log_sums,
    query_starts,
    words,
    output,
    group_size,
    num_programs,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`output = sum(2^log_sums * partials) / sum(2^log_sums)` over a row's parts.

    Program (i, j, k) combines row k of the list's sequence i with KV head j, unless one program
    attended all of its keys.
    """
    rank = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    num_seqs = tl.num_programs(0)
    if rank >= tl.load(words + _CONTEXTS):
        return
    starts = words + _HEADER + num_programs
    share = tl.load(words + _SHARE).to(tl.int64)
    head_place = tl.load(words + _TOTAL).to(tl.int64) * kv_head
    first = ((head_place + tl.load(starts + rank)) // share).to(tl.int32)
    last = ((head_place + tl.load(starts + rank + 1) - 1) // share).to(tl.int32)
    sequence = tl.load(starts + num_seqs + 1 + rank)
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    if (first == last) | (row >= query_len * group_size):
        return

    maximum = tl.full((), float("-inf"), tl.float32)
    for part in range(first, last + 1, PARTS):
        programs = part + tl.arange(0, PARTS)
        places = _part_rows(programs, first, row)
        logs = tl.load(log_sums + places, mask=programs <= last, other=float("-inf"))
        maximum = tl.maximum(maximum, tl.max(logs, 0))
    dims = tl.arange(0, PADDED_DIM)
    result = tl.zeros([PADDED_DIM], tl.float32)
    weight_sum = tl.full((), 0.0, tl.float32)
    for part in range(first, last + 1, PARTS):
        programs = part + tl.arange(0, PARTS)
        places = _part_rows(programs, first, row)
        is_part = programs <= last
        logs = tl.load(log_sums + places, mask=is_part, other=float("-inf"))
        weights = tl.exp2(logs - maximum)
        is_element = is_part[:, None] & (dims < HEAD_DIM)[None, :]
        pointers = partials + places[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(pointers, mask=is_element, other=0.0)
        result += tl.sum(values * weights[:, None], 0)
        weight_sum += tl.sum(weights, 0)
    token = (query_start + row // group_size).to(tl.int64)
    head = kv_head * group_size + row % group_size
    out = output + (token * (tl.num_programs(1) * group_size) + head) * HEAD_DIM + dims
    tl.store(out, (result / weight_sum).to(output.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _part_rows(programs, first, row):
    """Returns the rows of partial results that programs hold of one context, which program `first`
    begins.
    """
    parts = programs.to(tl.int64) * 2 + (programs == first).to(tl.int64)
    return parts * tl.num_programs(2) + row
