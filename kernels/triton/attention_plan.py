"""Divides a step's attention among programs, using numbers known to the host alone."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernels.triton.launch import AttentionLaunch, DecodeAttentionLaunch

__all__ = ["AttentionSizes", "Pass", "padded_dim", "plan_passes"]

# Sequences with more rows use the tiles of prompts.
_MAX_DECODE_ROWS = 64
_MAX_DECODE_SUMS = 64 * 256
_MAX_SUMS_OF_4_WARPS = 64 * 128
"""The sums of a block, rows times values, that fit the registers of the programs that share
contexts (`tests/triton/test_attention_machine_code.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """The sizes of a step that are known without reading from the device.

    Attributes:
        num_tokens: query tokens of all sequences.
        num_seqs: sequences.
        max_query_len: query tokens of the longest query.
        max_context_len: cached tokens of the longest context, limited by the sliding window.
        num_kv_heads: KV heads.
        group_size: query heads per KV head.
        value_dim: values of a head.
        num_processors: streaming multiprocessors of the device.
    """

    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_context_len: int
    num_kv_heads: int
    group_size: int
    value_dim: int
    num_processors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One launch: the sequences of `min_rows` to `max_rows` rows, in blocks of rows.

    Attributes:
        min_rows: query tokens times `group_size`, at least.
        max_rows: query tokens times `group_size`, at most.
        has_many_blocks: whether a sequence may have more than one block.
        num_blocks: an upper bound of the blocks of all sequences.
        num_kv_heads: KV heads; each has its own programs.
        rows_per_block: the most rows that a block has.
        num_programs: programs that share all contexts evenly (`attention_work`); 0 if each context
            is divided among `num_splits` programs instead.
        max_registers: of a thread of these programs; None for any number.
        num_splits: programs among which a block's context is divided, at most.
        padded_splits: a power of two, at least `num_splits` of any step.
        min_tokens_per_split: the least cached tokens of a split.
        block_m: rows of a block, padded.
        block_n: cached tokens of a tile.
        num_warps: warps of a program.
        num_stages: as in `AttentionLaunch`.
    """

    min_rows: int
    max_rows: int
    has_many_blocks: bool
    num_blocks: int
    num_kv_heads: int
    rows_per_block: int
    num_programs: int = 0
    max_registers: int | None = None
    num_splits: int
    padded_splits: int
    min_tokens_per_split: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def num_split_rows(self) -> int:
        """The most rows with partial results of splits; 0 if no context is divided.

        Contexts are divided only until all processors are busy, so rows times splits are fewer
        than `2 * num_processors * programs_per_sm * block_m`, however many tokens a step has.
        """
        if self.num_splits == 1:
            return 0
        return self.num_blocks * self.num_kv_heads * self.rows_per_block

    @property
    def num_partial_rows(self) -> int:
        """The rows of partial results of programs that share contexts: two blocks of each."""
        return 2 * self.num_programs * self.rows_per_block


def plan_passes(
    sizes: AttentionSizes, decode: DecodeAttentionLaunch, prefill: AttentionLaunch
) -> Sequence[Pass]:
    """Returns the passes that together attend every sequence of a step once.

    Sequences with few rows and with many use different tiles. If a step may hold both, which only
    the device knows, each kind gets a pass, in which the programs of the other kind end at once.
    """
    most_rows = sizes.max_query_len * sizes.group_size
    fewest_rows = most_rows if _is_uniform(sizes) else sizes.group_size
    most_decoded = _MAX_DECODE_SUMS // padded_dim(sizes.value_dim)
    most_decoded = max(decode.block_m, min(_MAX_DECODE_ROWS, most_decoded))
    few_rows = _decode_block_m(sizes, decode, min(most_decoded, prefill.block_m))
    passes = []
    if fewest_rows <= few_rows:
        passes.append(_decode_pass(sizes, decode, few_rows))
    if most_rows > few_rows:
        min_rows = few_rows + 1 if passes else 1
        passes.append(_prefill_pass(sizes, decode, prefill, min_rows))
    return passes


def _decode_pass(sizes: AttentionSizes, decode: DecodeAttentionLaunch, few_rows: int) -> Pass:
    decode = _launch_for_rows(decode, few_rows, padded_dim(sizes.value_dim))
    num_wanted = sizes.num_processors * decode.programs_per_sm
    return Pass(
        min_rows=1,
        max_rows=few_rows,
        has_many_blocks=False,
        num_blocks=sizes.num_seqs,
        num_kv_heads=sizes.num_kv_heads,
        rows_per_block=min(few_rows, sizes.max_query_len * sizes.group_size),
        num_programs=_num_sharing(sizes, decode, num_wanted) if decode.shares_evenly else 0,
        max_registers=decode.max_registers,
        num_splits=_num_splits(sizes, decode, sizes.num_seqs, num_wanted),
        padded_splits=_next_power_of_2(decode.max_splits),
        min_tokens_per_split=decode.min_tokens_per_split,
        block_m=few_rows,
        block_n=decode.block_n,
        num_warps=decode.num_warps,
        num_stages=decode.num_stages,
    )


def _prefill_pass(
    sizes: AttentionSizes,
    decode: DecodeAttentionLaunch,
    prefill: AttentionLaunch,
    min_rows: int,
) -> Pass:
    # Each sequence may leave a block partly empty.
    num_blocks = sizes.num_tokens * sizes.group_size // prefill.block_m + sizes.num_seqs
    return Pass(
        min_rows=min_rows,
        max_rows=sizes.max_query_len * sizes.group_size,
        has_many_blocks=True,
        num_blocks=num_blocks,
        num_kv_heads=sizes.num_kv_heads,
        rows_per_block=min(prefill.block_m, sizes.max_query_len * sizes.group_size),
        num_splits=_num_splits(sizes, decode, num_blocks, sizes.num_processors),
        padded_splits=_next_power_of_2(decode.max_splits),
        min_tokens_per_split=decode.min_tokens_per_split,
        block_m=prefill.block_m,
        block_n=prefill.block_n,
        num_warps=prefill.num_warps,
        num_stages=prefill.num_stages,
    )


@functools.cache
def _launch_for_rows(
    decode: DecodeAttentionLaunch, block_m: int, padded_values: int
) -> DecodeAttentionLaunch:
    """Returns parameters with which the sums of a block stay in registers."""
    if block_m <= decode.block_m or not decode.shares_evenly:
        return decode
    if block_m * padded_values > _MAX_SUMS_OF_4_WARPS:
        return replace(decode, num_warps=max(8, decode.num_warps), programs_per_sm=1)
    return replace(decode, programs_per_sm=min(2, decode.programs_per_sm))


def _is_uniform(sizes: AttentionSizes) -> bool:
    """Returns whether all sequences must have the longest query."""
    return sizes.num_tokens == sizes.num_seqs * sizes.max_query_len


def _decode_block_m(sizes: AttentionSizes, decode: DecodeAttentionLaunch, largest: int) -> int:
    """Returns the rows of a decode block: of the longest query if they fit, else of one token.

    Returns 0 if neither fits.
    """
    for num_rows in (sizes.max_query_len * sizes.group_size, sizes.group_size):
        block_m = max(decode.block_m, _next_power_of_2(num_rows))
        if block_m <= largest:
            return block_m
    return 0


def _num_splits(
    sizes: AttentionSizes, decode: DecodeAttentionLaunch, num_blocks: int, num_wanted: int
) -> int:
    """Returns how many programs share a context, given the `num_wanted` programs of the launch."""
    useful = -(-sizes.max_context_len // decode.min_tokens_per_split)
    for_all = -(-num_wanted // (num_blocks * sizes.num_kv_heads))
    return max(1, min(useful, for_all, decode.max_splits))


def _num_sharing(sizes: AttentionSizes, decode: DecodeAttentionLaunch, num_wanted: int) -> int:
    """Returns how many programs share all contexts: no more than have something to do."""
    useful = sizes.max_context_len // decode.min_tokens_per_split + 1
    return min(num_wanted, useful * sizes.num_seqs * sizes.num_kv_heads)


def padded_dim(head_dim: int) -> int:
    """Returns the least power of two that is at least `head_dim` and 16, for matrix products."""
    return max(16, _next_power_of_2(head_dim))


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
