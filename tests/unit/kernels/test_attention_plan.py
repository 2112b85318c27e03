"""`plan_passes`: the division of Triton's attention among passes and programs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.triton.attention_plan import AttentionSizes, padded_dim, plan_passes
from kernels.triton.launch import AttentionLaunch, DecodeAttentionLaunch

DECODE = DecodeAttentionLaunch(
    block_m=16,
    block_n=64,
    num_warps=4,
    num_stages=3,
    min_tokens_per_split=256,
    max_splits=64,
    programs_per_sm=2,
    shares_evenly=0,
)
PREFILL = AttentionLaunch(block_m=128, block_n=64, num_warps=8, num_stages=3)


def sizes_of(
    query_lens,
    *,
    max_context_len=4096,
    group_size=4,
    value_dim=128,
    num_kv_heads=8,
    num_processors=132,
):
    return AttentionSizes(
        num_tokens=sum(query_lens),
        num_seqs=len(query_lens),
        max_query_len=max(query_lens),
        max_context_len=max_context_len,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        value_dim=value_dim,
        num_processors=num_processors,
    )


def plan(query_lens, **options):
    return plan_passes(sizes_of(query_lens, **options), DECODE, PREFILL)


@given(
    query_lens=st.lists(st.integers(0, 700), min_size=1, max_size=20).filter(any),
    group_size=st.integers(1, 200),
)
def test_exactly_one_pass_with_enough_blocks_handles_each_sequence(query_lens, group_size):
    passes = plan(query_lens, group_size=group_size)
    for query_len in filter(None, query_lens):
        rows = query_len * group_size
        (own,) = [part for part in passes if part.min_rows <= rows <= part.max_rows]
        assert own.has_many_blocks or rows <= own.block_m
    for part in passes:
        num_blocks = len(query_lens)
        if part.has_many_blocks:
            num_blocks = sum(-(-length * group_size // part.block_m) for length in query_lens)
        assert part.num_blocks >= num_blocks


@pytest.mark.parametrize(
    ("num_rows", "value_dim", "num_warps", "programs_per_sm"),
    [(4, 128, 4, 3), (20, 128, 4, 2), (64, 128, 4, 2), (20, 512, 8, 1), (64, 256, 8, 1)],
)
def test_programs_with_more_sums_get_more_registers(
    num_rows, value_dim, num_warps, programs_per_sm
):
    sharing = replace(DECODE, shares_evenly=1, programs_per_sm=3)
    sizes = sizes_of([num_rows // 4] * 64, value_dim=value_dim)
    (part,) = plan_passes(sizes, sharing, PREFILL)
    assert (part.num_warps, part.num_programs) == (num_warps, 132 * programs_per_sm)
    assert not part.has_many_blocks


def test_blocks_whose_sums_do_not_fit_the_registers_use_the_tiles_of_prompts():
    (part,) = plan_passes(sizes_of([16] * 8, value_dim=512), DECODE, PREFILL)
    assert part.has_many_blocks


def test_single_token_sequences_use_the_smallest_tiles():
    (decode,) = plan([1] * 5)
    assert (decode.block_m, decode.has_many_blocks, decode.num_blocks) == (16, False, 5)


@pytest.mark.parametrize(("query_len", "block_m"), [(4, 16), (5, 32), (8, 32), (16, 64)])
def test_decode_tiles_grow_to_hold_every_token_of_a_sequence(query_len, block_m):
    (decode,) = plan([1, query_len])
    assert decode.block_m == block_m


def test_prompts_alone_need_no_decode_pass():
    (prefill,) = plan([512, 512])
    assert prefill.has_many_blocks
    assert (prefill.min_rows, prefill.block_m) == (1, 128)


def test_prompts_and_single_tokens_use_separate_passes():
    decode, prefill = plan([1, 1, 512])
    assert (decode.max_rows, prefill.min_rows) == (16, 17)


def test_head_groups_larger_than_decode_tiles_use_the_prefill_pass():
    (prefill,) = plan([1, 1], group_size=100)
    assert prefill.has_many_blocks


def test_decode_tiles_are_no_larger_than_prefill_tiles():
    small = replace(PREFILL, block_m=16)
    (few,) = plan_passes(sizes_of([4, 4]), DECODE, small)
    assert not few.has_many_blocks
    (many,) = plan_passes(sizes_of([5, 5]), DECODE, small)
    assert (many.has_many_blocks, many.block_m) == (True, 16)


@pytest.mark.parametrize(
    ("num_seqs", "max_context_len", "num_splits"),
    [
        (1, 100_000, 33),  # 264 programs wanted, 8 without splits
        (16, 100_000, 3),
        (33, 100_000, 1),
        (34, 100_000, 1),
        (1, 256, 1),
        (1, 257, 2),
        (1, 0, 1),
    ],
)
def test_contexts_are_divided_until_processors_are_busy(num_seqs, max_context_len, num_splits):
    (decode,) = plan([1] * num_seqs, max_context_len=max_context_len)
    assert decode.num_splits == num_splits


def test_contexts_are_split_into_at_most_max_splits():
    sizes = sizes_of([1], max_context_len=1 << 20, num_kv_heads=1)
    (decode,) = plan_passes(sizes, replace(DECODE, max_splits=7), PREFILL)
    assert decode.num_splits == 7


def test_a_small_chunk_of_a_long_context_is_divided_too():
    (small,) = plan([64], max_context_len=30_000)
    (large,) = plan([8192], max_context_len=30_000)
    assert small.num_splits == 6  # each of 3 blocks times 8 heads
    assert large.num_splits == 1


@pytest.mark.parametrize(
    ("num_seqs", "max_context_len", "num_programs"),
    [(1, 100_000, 264), (64, 100_000, 264), (1, 255, 8), (1, 256, 16), (500, 1, 264)],
)
def test_programs_that_share_contexts_are_as_many_as_are_busy(
    num_seqs, max_context_len, num_programs
):
    sizes = sizes_of([1] * num_seqs, max_context_len=max_context_len)
    (decode,) = plan_passes(sizes, replace(DECODE, shares_evenly=1), PREFILL)
    assert decode.num_programs == num_programs
    assert decode.num_partial_rows == 2 * num_programs * 4


def test_only_passes_with_split_contexts_store_partial_results():
    decode, prefill = plan([1, 1, 8190], max_context_len=30_000)
    assert decode.num_split_rows == 3 * 8 * 16  # every sequence counts as a whole block of rows
    assert (prefill.num_splits, prefill.num_split_rows) == (1, 0)


def test_single_tokens_store_one_partial_row_per_head():
    (decode,) = plan([1] * 5)
    assert decode.num_split_rows == 5 * 32


@given(
    query_lens=st.lists(st.integers(0, 9000), min_size=1, max_size=300).filter(any),
    max_context_len=st.integers(0, 1 << 20),
    group_size=st.integers(1, 200),
    num_kv_heads=st.integers(1, 100),
)
def test_the_size_of_partial_results_is_bounded_for_any_step(query_lens, **options):
    for part in plan(query_lens, **options):
        num_results = part.num_split_rows * part.num_splits
        assert num_results < 2 * 132 * DECODE.programs_per_sm * part.block_m
        assert part.num_splits <= part.padded_splits


def test_head_dims_are_padded_to_powers_of_two_from_16_on():
    assert [padded_dim(size) for size in (1, 16, 17, 64, 80, 256)] == [16, 16, 32, 64, 128, 256]
