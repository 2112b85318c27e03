"""Paged attention in Triton: the rows of a block, and the division of its context."""

import triton
import triton.language as tl

__all__ = ["divide_context", "locate_block"]


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
    first_position = num_before + first_row // group_size
    last_position = num_before + (tl.minimum(first_row + block_m, num_rows) - 1) // group_size
    low = tl.maximum(first_position - window + 1, 0)
    high = tl.maximum(last_position + 1, 0)
    num_tokens = high - low // block_n * block_n
    per_split = tl.maximum(tl.cdiv(num_tokens, num_splits), min_tokens_per_split)
    per_split = tl.cdiv(per_split, block_n) * block_n
    num_used_splits = tl.maximum(tl.cdiv(num_tokens, per_split), 1)
    return low, high, per_split, num_used_splits


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
