"""Triton's paged attention with unusual layouts, empty contexts and non-finite values."""

from dataclasses import replace

import pytest
import torch

from tests.support.devices import DEVICE
from tests.support.pairs import pairs
from tests.support.triton_attention import attend, check, make_case

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

DTYPES = [torch.float32, torch.bfloat16]
DECODE = [(0, 1), (30, 1), (300, 1), (130, 1)]
MIXED = [(120, 1), (0, 29), (30, 1), (65, 6), (0, 1)]


def with_meta(case, **changes):
    return replace(case, meta=replace(case.meta, **changes))


@pytest.mark.parametrize(
    ("spans", "sliding_window", "dtype"),
    pairs([[(200, 1), (3, 1)], [(170, 40), (64, 5), (90, 1)]], (1, 60), DTYPES),
)
def test_blocks_before_the_windows_may_be_freed(spans, sliding_window, dtype):
    check(make_case(spans, dtype=dtype).with_freed_blocks(sliding_window), sliding_window)


@pytest.mark.parametrize("spans", [DECODE, MIXED])
def test_tables_may_be_wider_than_contexts_and_name_any_blocks_there(spans):
    case = make_case(spans, dtype=torch.bfloat16)
    tables = case.meta.block_tables
    wide = torch.cat([tables, torch.full((len(tables), 5), 1, dtype=torch.int32)], dim=1)
    check(with_meta(case, block_tables=wide))


@pytest.mark.parametrize("spans", [DECODE, MIXED])
def test_tables_may_be_strided(spans):
    case = make_case(spans, dtype=torch.bfloat16)
    tables = case.meta.block_tables
    wide = torch.full((len(tables), tables.shape[1] + 3), 1 << 30, dtype=torch.int32)
    wide[:, : tables.shape[1]] = tables
    moved = case.on(DEVICE)
    apart = wide.to(DEVICE)[:, : tables.shape[1]]
    assert apart.stride(0) == tables.shape[1] + 3
    moved = with_meta(moved, block_tables=apart)
    assert torch.equal(attend(moved), attend(case))


@pytest.mark.parametrize("spans", [[(6, 1), (0, 1), (70, 1)], [(9, 70), (0, 1), (9, 8), (0, 1)]])
def test_an_empty_context_yields_zeros_and_does_not_affect_others(spans):
    case = make_case(spans)
    expected = check(case)
    is_empty = [span == (0, 1) for span in spans]
    contexts = case.meta.context_lens.clone()
    contexts[torch.tensor(is_empty)] = 0
    output = attend(with_meta(case, context_lens=contexts))
    rows = torch.cat([torch.full((n,), e) for (_, n), e in zip(spans, is_empty, strict=True)])
    assert not output[rows].any()
    torch.testing.assert_close(output[~rows], expected[~rows])


@pytest.mark.parametrize("spans", [[(6, 1), (70, 1)], [(9, 70), (4, 1)]])
def test_padding_with_empty_sequences_and_unused_rows_is_ignored(spans):
    case = make_case(spans)
    expected = check(case)
    meta = case.meta
    starts = torch.cat([meta.query_starts, meta.query_starts[-1:].expand(3)])
    contexts = torch.cat([meta.context_lens, torch.tensor([0, 5, 0], dtype=torch.int32)])
    tables = torch.cat(
        [meta.block_tables, meta.block_tables.new_zeros(3, meta.block_tables.shape[1])]
    )
    query = torch.cat([case.query, case.query[:2]])
    padded = with_meta(case, query_starts=starts, context_lens=contexts, block_tables=tables)
    output = attend(replace(padded, query=query))
    torch.testing.assert_close(output[: len(expected)], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("spans", [DECODE, MIXED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_maximum_lengths_may_be_overestimated(spans, dtype):
    # A graph is captured with maximum lengths that fit every step up to a size.
    case = make_case(spans, dtype=dtype)
    check(with_meta(case, max_context_len=8000))
    check(with_meta(case, max_context_len=8000), 50)


@pytest.mark.parametrize("spans", [DECODE, MIXED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slice_of_a_wider_query_gives_the_result_of_its_copy(spans, dtype):
    case = make_case(spans, dtype=dtype).on(DEVICE)
    expected = attend(case)
    num_tokens = len(case.query)
    wide = torch.full((num_tokens, 10, 64), torch.nan, dtype=dtype, device=DEVICE)
    by_head = torch.empty(3, num_tokens, 64, dtype=dtype, device=DEVICE).transpose(0, 1)
    for query in (wide[:, 2:5], wide[:, :3], by_head):
        query.copy_(case.query)
        output = attend(replace(case, query=query))
        assert torch.equal(output, expected)
        assert output.is_contiguous()


@pytest.mark.parametrize("order", [(0, 4, 1, 3, 2, 5), (3, 1, 0, 2, 4, 5)])
def test_pools_may_have_axes_in_another_memory_order(order):
    case = make_case(MIXED, dtype=torch.bfloat16)
    back = [order.index(axis) for axis in range(6)]
    pool = case.pool.permute(order).contiguous().permute(back)
    moved = replace(case.on(DEVICE), pool=pool.to(DEVICE))
    assert moved.pool.stride() == pool.stride()
    assert torch.equal(attend(moved, 7), attend(case, 7))


def test_attention_does_not_change_the_pool_or_the_query():
    case = make_case(MIXED).on(DEVICE)
    pool, query = case.pool.clone(), case.query.clone()
    attend(case, 3)
    assert torch.equal(case.pool.view(torch.int32), pool.view(torch.int32))
    assert torch.equal(case.query, query)


# The interpreter computes with numpy, which warns about NaN.
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("value", "spans", "dtype"), pairs((torch.nan, torch.inf), (DECODE, MIXED), DTYPES)
)
def test_a_non_finite_sequence_does_not_affect_others(value, spans, dtype):
    case = make_case(spans, dtype=dtype)
    expected = attend(case)
    first, last = case.meta.query_starts[3:5].tolist()
    case.pool[case.meta.block_tables[3, 0].long()] = value
    output = attend(case)
    assert output[first:last].isnan().all()
    others = [row for row in range(len(output)) if not first <= row < last]
    torch.testing.assert_close(output[others], expected[others], atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("span", [(40, 3), (40, 30)])
def test_a_non_finite_query_does_not_affect_other_tokens_or_heads(span):
    case = make_case([span], dtype=torch.bfloat16)
    expected = attend(case)
    case.query[2, 2, 5] = torch.nan
    output = attend(case)
    assert output[2, 2].isnan().all()
    output[2, 2] = expected[2, 2]
    assert torch.equal(output, expected)


def test_elements_of_a_head_must_be_adjacent():
    case = make_case(DECODE)
    pool = case.pool.transpose(4, 5).contiguous().transpose(4, 5)
    with pytest.raises(AssertionError):
        attend(replace(case, pool=pool))
