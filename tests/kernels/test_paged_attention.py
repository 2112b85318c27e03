"""Paged attention of the kernels that serve the CPU, against float64, in pools full of NaN."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from tests.support.attention_cases import make_case
from tests.support.kernel_checks import DTYPES, native_only, normal, on_threads
from tests.support.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# (start, query length) of each sequence.
MIXES = {
    "one token": [(0, 1)],
    "decode": [(0, 1), (7, 1), (200, 1), (63, 1), (64, 1), (9, 1)],
    "prompts": [(0, 70), (0, 1), (0, 33)],
    "cached prefix": [(90, 5), (3, 2), (64, 64)],
    "mixed": [(120, 1), (0, 29), (30, 1), (65, 6), (0, 1), (4, 2)],
}
HEADS = [(1, 1), (3, 3), (6, 2), (14, 2), (7, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 2, 5, 8, 33, 64, 80, 96, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads, head_dim, dtype):
    case = make_case(
        MIXES["mixed"],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
        scale=head_dim**-0.5,
    )
    case.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sliding_window", [None, 1, 2, 7, 64, 65, 1000])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 48])
@pytest.mark.parametrize("mix", MIXES)
def test_block_sizes_and_windows(mix, block_size, sliding_window, dtype):
    make_case(MIXES[mix], block_size=block_size, head_dim=8, dtype=dtype).check(sliding_window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 12, 13, 63, 64, 65])
def test_contexts_around_the_ends_of_tiles(length, dtype):
    ends = [end for tile in (64, 128, 256) for end in (tile - 1, tile, tile + 1, tile + 33)]
    spans = [(end - length, length) for end in ends if end >= length]
    make_case(spans, head_dim=16, block_size=16, dtype=dtype).check()
    make_case(spans, head_dim=16, block_size=16, dtype=dtype).check(sliding_window=64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sliding_window", [None, 1000])
def test_contexts_of_several_thousand_tokens(sliding_window, dtype):
    case = make_case(
        [(4999, 1), (2500, 3), (4095, 1)], num_heads=4, head_dim=64, block_size=16, dtype=dtype
    )
    case.check(sliding_window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "span"),
    [((1, 1), (0, 400)), ((2, 2), (50, 193)), ((7, 1), (33, 100)), ((3, 1), (0, 129))],
)
@pytest.mark.parametrize("sliding_window", [None, 40])
def test_chunks_of_more_rows_than_one_unit_of_work(heads, span, sliding_window, dtype):
    case = make_case(
        [(3, 1), span, (0, 2)],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=32,
        block_size=16,
        dtype=dtype,
    )
    case.check(sliding_window)


def test_more_heads_per_kv_head_than_rows_in_a_unit_of_work():
    make_case([(70, 3), (5, 1)], num_heads=200, num_kv_heads=1, head_dim=8).check()


@pytest.mark.parametrize(
    ("heads", "shape", "soft_cap", "dtype"),
    pairs([(6, 2), (7, 1)], [(None, 64), (40, 33), (None, 5)], [None, 0.5, 30.0], DTYPES),
)
def test_soft_caps_and_sinks(heads, shape, soft_cap, dtype):
    sliding_window, head_dim = shape
    case = make_case(
        [*MIXES["mixed"], (250, 150)],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=dtype,
        soft_cap=soft_cap,
        has_sinks=soft_cap != 0.5,
    )
    case.check(sliding_window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", [-torch.inf, -1e4, 1e4])
def test_sinks_far_from_zero(sink, dtype):
    case = make_case(MIXES["mixed"], dtype=dtype, has_sinks=True)
    case.sinks[1::2] = sink
    case.check()


@pytest.mark.parametrize("narrow_dtype", [torch.float8_e4m3fn, torch.int8])
def test_sinks_of_a_quantized_cache(narrow_dtype):
    make_case(MIXES["mixed"], soft_cap=5.0, has_sinks=True).quantized(narrow_dtype).check()


@settings(max_examples=80, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (5, 1), (14, 2)]),
    head_dim=st.integers(1, 70),
    block_size=st.integers(1, 50),
    sliding_window=st.none() | st.integers(1, 150),
    soft_cap=st.none() | st.floats(0.1, 60),
    has_sinks=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_shape(spans, heads, sliding_window, **shape):
    make_case(spans, num_heads=heads[0], num_kv_heads=heads[1], **shape).check(sliding_window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sliding_window", [1, 5, 16, 60, 64, 100])
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_blocks_before_the_windows_may_be_freed(block_size, sliding_window, dtype):
    case = make_case([(200, 1), (170, 60), (64, 5), (3, 1)], block_size=block_size, dtype=dtype)
    case.with_freed_blocks(sliding_window).check(sliding_window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_may_name_any_blocks_past_the_contexts(dtype):
    case = make_case([(30, 1), (0, 7)], block_size=4, dtype=dtype)
    tables = torch.cat([case.meta.block_tables, torch.zeros(2, 3, dtype=torch.int32)], dim=1)
    replace(case, meta=replace(case.meta, block_tables=tables)).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spans", [[(6, 1), (0, 1), (70, 1)], [(0, 1), (9, 8)]])
@pytest.mark.parametrize("rule", [{}, {"soft_cap": 3.0, "has_sinks": True}])
def test_an_empty_context_yields_zeros_and_does_not_affect_others(rule, spans, dtype):
    case = make_case(spans, head_dim=8, dtype=dtype, **rule)
    expected = case.check()
    contexts = torch.tensor([sum(span) * (span != (0, 1)) for span in spans], dtype=torch.int32)
    output = replace(case, meta=replace(case.meta, context_lens=contexts)).attend()
    empty = spans.index((0, 1))
    assert not output[empty].any()
    others = [row for row in range(len(output)) if row != empty]
    torch.testing.assert_close(output[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [10.0, 1000.0])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_scores_far_from_zero(soft_cap, size, dtype):
    case = make_case(MIXES["mixed"], head_dim=16, dtype=dtype, soft_cap=soft_cap)
    replace(case, query=case.query * size).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slice_of_a_wider_query_gives_the_result_of_its_copy(dtype):
    case = make_case(MIXES["mixed"], head_dim=8, dtype=dtype)
    expected = case.check()
    wide = torch.full((len(case.query), 10, 8), torch.nan, dtype=dtype)
    by_head = torch.empty(6, len(case.query), 8, dtype=dtype).transpose(0, 1)
    for query in (wide[:, 2:8], wide[:, :6], by_head):
        query.copy_(case.query)
        assert torch.equal(replace(case, query=query).attend(), expected)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (0, 4, 1, 3, 2, 5), (3, 1, 0, 2, 4, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_may_have_axes_in_another_memory_order(order, dtype):
    case = make_case(MIXES["mixed"], head_dim=8, dtype=dtype)
    back = [order.index(axis) for axis in range(6)]
    pool = case.pool.permute(order).contiguous().permute(back)
    assert torch.equal(replace(case, pool=pool).attend(7), case.attend(7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_does_not_change_the_pool_or_the_query(dtype):
    case = make_case(MIXES["mixed"], head_dim=8, dtype=dtype)
    pool, query = case.pool.clone(), case.query.clone()
    case.attend(sliding_window=3)
    assert torch.equal(case.pool.view(torch.int16), pool.view(torch.int16))
    assert torch.equal(case.query, query)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spans", [MIXES["mixed"], MIXES["decode"]])
def test_a_non_finite_sequence_does_not_affect_others(spans, dtype):
    case = make_case(spans, head_dim=8, dtype=dtype)
    expected = case.attend()
    starts = case.meta.query_starts.tolist()
    first, last = starts[3], starts[4]
    case.pool[case.meta.block_tables[3, 0].long()] = torch.nan
    output = case.attend()
    assert output[first:last].isnan().all()
    others = [row for row in range(len(output)) if not first <= row < last]
    torch.testing.assert_close(output[others], expected[others], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_query_does_not_affect_other_tokens_or_heads(dtype):
    case = make_case([(40, 30)], head_dim=8, dtype=dtype)
    expected = case.attend()
    case.query[17, 2, 5] = torch.nan
    output = case.attend()
    assert output[17, 2].isnan().all()
    output[17, 2] = expected[17, 2]
    assert torch.equal(output, expected)


@native_only("torch sums in an order of its own")
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_thread_or_several_give_the_same_bits(dtype):
    case = make_case([*MIXES["mixed"], (0, 300)], head_dim=64, block_size=16, dtype=dtype)
    one, two, five = on_threads([1, 2, 5], case.attend)
    assert torch.equal(one, two)
    assert torch.equal(one, five)


@native_only("the reference takes no step of no tokens")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_step_of_no_tokens(num_threads):
    case = make_case([(3, 2)], head_dim=64, block_size=16, dtype=torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    meta = replace(
        case.meta,
        block_tables=case.meta.block_tables[:0],
        query_starts=case.meta.query_starts[:1],
        context_lens=case.meta.context_lens[:0],
        slot_mapping=none,
    )
    query = case.query[:0]
    (output,) = on_threads(
        [num_threads], lambda: kernels.paged_attention(query, case.kv_layer, meta, scale=1.0)
    )
    assert output.shape == query.shape


@native_only("the reference takes any strides")
def test_elements_of_a_head_must_be_adjacent():
    case = make_case(MIXES["one token"], head_dim=8)
    pool = case.pool.transpose(4, 5).contiguous().transpose(4, 5)
    with pytest.raises(AssertionError):
        kernels.paged_attention(normal(1, 6, 8), pool[:, 1], case.meta, scale=1.0)
