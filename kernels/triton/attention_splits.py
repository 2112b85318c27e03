"""Paged attention in Triton: the rows of a block, and contexts that several programs share."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.paged_kv import AttentionMetadata
from kernels.triton.attention_plan import Pass, padded_dim

__all__ = ["Splits", "divide_context", "find_span", "locate_block"]


@triton.jit
def locate_block(block, query_starts, num_seqs, group_size, block_m, has_many_blocks):
    """Returns a block's sequence and first row, and the start and length of the sequence's query.

    With `has_many_blocks` the blocks of all sequences are numbered consecutively; otherwise each
    sequence has one block. A block that belongs to no sequence begins past its sequence's rows.
    """
    sequence = block
    first_row = block * 0
    if has_many_blocks:
        sequence = _sequence_of_block(block, query_starts, num_seqs, group_size, block_m)
        first_row = block - _first_block(sequence, query_starts, group_size, block_m)
        first_row *= block_m
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    return sequence, first_row, query_start, query_len


@triton.jit
def divide_context(
    first_row,
    num_rows,
    num_before,
    group_size,
    window,
    num_splits,
    min_tokens_per_split,
    block_m,
    block_n,
):
    """Returns the range of keys that a block's rows attend to, and how it is divided into splits.

    The first split begins with the tile that `low` lies in.
    """
    low, high = find_span(first_row, num_rows, num_before, group_size, window, block_m)
    num_tokens = high - low // block_n * block_n
    per_split = tl.maximum(tl.cdiv(num_tokens, num_splits), min_tokens_per_split)
    per_split = tl.cdiv(per_split, block_n) * block_n
    num_used_splits = tl.maximum(tl.cdiv(num_tokens, per_split), 1)
    return low, high, per_split, num_used_splits


@triton.jit
def find_span(first_row, num_rows, num_before, group_size, window, block_m):
    """Returns the range of keys that a block's rows attend to."""
    first_position = num_before + first_row // group_size
    last_position = num_before + (tl.minimum(first_row + block_m, num_rows) - 1) // group_size
    return tl.maximum(first_position - window + 1, 0), tl.maximum(last_position + 1, 0)


@triton.jit
def _first_block(sequence, query_starts, group_size, block_m):
    """Returns the number of a sequence's first block, if each may leave one block partly empty.

    The next sequence's blocks do not overlap them: `floor(a) + ceil(b) <= floor(a + b) + 1`.
    """
    return tl.load(query_starts + sequence) * group_size // block_m + sequence


@triton.jit
def _sequence_of_block(block, query_starts, num_seqs, group_size, block_m):
    """Finds the last sequence whose blocks begin at `block` or before."""
    low = block * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_later = _first_block(middle, query_starts, group_size, block_m) > block
        low = tl.where(is_later, low, middle)
        high = tl.where(is_later, middle, high)
    return low


@dataclass(frozen=True, slots=True)
class Splits:
    """The partial results of a pass, to be combined.

    The rows are those of blocks, `[num_blocks, num_kv_heads, rows_per_block]`, not the step's:
    in a step of many tokens few sequences may divide their contexts (`Pass.num_split_rows`).

    Attributes:
        partials: `[rows, num_splits, value_dim]` float32, each split's result.
        log_sums: `[rows, num_splits]` float32, log2 of the sum of each split's weights.
    """

    partials: torch.Tensor
    log_sums: torch.Tensor

    @classmethod
    def for_pass(cls, part: Pass, output: torch.Tensor) -> "Splits":
        """Allocates uninitialized memory for a pass with such an output."""
        shape = part.num_split_rows, part.num_splits
        return cls(
            torch.empty((*shape, output.shape[2]), dtype=torch.float32, device=output.device),
            torch.empty(shape, dtype=torch.float32, device=output.device),
        )

    def combine(
        self, part: Pass, meta: AttentionMetadata, window: int, output: torch.Tensor
    ) -> None:
        """Writes combined results to `output`, `[num_tokens, num_heads, value_dim]` contiguous."""
        if part.num_splits == 1:
            return
        num_heads, head_dim = output.shape[1:]
        _combine_kernel[(part.num_blocks, part.num_kv_heads, part.rows_per_block)](
            self.partials,
            self.log_sums,
            meta.query_starts,
            meta.context_lens,
            output,
            part.num_splits,
            window,
            num_heads // part.num_kv_heads,
            len(meta.context_lens),
            part.min_rows,
            part.max_rows,
            part.min_tokens_per_split,
            part.block_m,
            part.block_n,
            int(part.has_many_blocks),
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim(head_dim),
            PADDED_SPLITS=part.padded_splits,
        )


# One compiled version serves all passes: some divide contexts for the first time while serving.
@triton.jit(
    do_not_specialize=[
        "num_splits",
        "window",
        "group_size",
        "num_seqs",
        "min_rows",
        "max_rows",
        "min_tokens_per_split",
        "block_m",
        "block_n",
        "has_many_blocks",
    ],
    do_not_specialize_on_alignment=["query_starts", "context_lens"],
)
def _combine_kernel(
    partials,
    log_sums,
    query_starts,
    context_lens,
    output,
    num_splits,
    window,
    group_size,
    num_seqs,
    min_rows,
    max_rows,
    min_tokens_per_split,
    block_m,
    block_n,
    has_many_blocks,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """`output = sum(2^log_sums * partials) / sum(2^log_sums)` over a row's splits.

    Program (i, j, k) combines row k of block i with KV head j, unless the block had a single
    split. It locates the block and divides its context as `attend_kernel` does.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence, first_row, query_start, query_len = locate_block(
        block, query_starts, num_seqs, group_size, block_m, has_many_blocks != 0
    )
    num_rows = query_len * group_size
    row = first_row + tl.program_id(2)
    if (row >= num_rows) | (num_rows < min_rows) | (num_rows > max_rows):
        return
    num_before = tl.load(context_lens + sequence) - query_len
    _, _, _, num_used_splits = divide_context(
        first_row, num_rows, num_before, group_size, window,
        num_splits, min_tokens_per_split, block_m, block_n,
    )  # fmt: skip
    if num_used_splits == 1:
        return

    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    is_used = splits < num_used_splits
    split_row = block.to(tl.int64) * tl.num_programs(1) + kv_head
    split_row = split_row * tl.num_programs(2) + tl.program_id(2)
    parts = split_row * num_splits + splits
    logs = tl.load(log_sums + parts, mask=is_used, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, 0))
    is_element = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = partials + parts[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(pointers, mask=is_element, other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    token = (query_start + row // group_size).to(tl.int64)
    head = kv_head * group_size + row % group_size
    out_row = token * (tl.num_programs(1) * group_size) + head
    out = output + out_row * HEAD_DIM + dims
    tl.store(out, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
