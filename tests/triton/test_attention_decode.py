"""Triton's paged attention of sequences with few query tokens, against float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton import attention
from tests.support.triton_attention import attend, check, make_case

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.sampled(one_in=2)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DECODE = [(0, 1), (7, 1), (200, 1), (63, 1), (64, 1), (9, 1)]
SPECULATION = [(0, 5), (130, 2), (3, 1), (62, 8), (64, 4)]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spans", [[(0, 1)], DECODE, SPECULATION])
def test_types(spans, dtype):
    check(make_case(spans, dtype=dtype))


@pytest.mark.parametrize(
    "sliding_window",
    [1, 7, 65, 1000, *(pytest.param(width, marks=pytest.mark.slow) for width in (2, 64))],
)
def test_windows(sliding_window):
    check(make_case([(200, 1), *SPECULATION], dtype=torch.bfloat16), sliding_window)


@pytest.mark.parametrize("spans", [[(100, 1)], [(30, 3), (5, 2)]])
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (14, 2), (8, 1), (16, 1), (33, 1), (80, 1)])
def test_heads(heads, spans):
    check(make_case(spans, num_heads=heads[0], num_kv_heads=heads[1], dtype=torch.bfloat16))


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 5, 33, 64, 80, 128, 256])
def test_head_sizes(head_dim, dtype):
    check(make_case([(150, 1), (20, 2)], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 48, 128])
def test_block_sizes(block_size):
    check(make_case([(200, 1), (15, 1), (47, 3)], block_size=block_size, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("length", "sliding_window"),
    [
        (1, None),
        (4, 300),
        pytest.param(1, 300, marks=pytest.mark.slow),
        pytest.param(4, None, marks=pytest.mark.slow),
    ],
)
def test_contexts_around_the_ends_of_splits_and_tiles(length, sliding_window):
    ends = [end + more for end in (128, 384) for more in (-1, 0, 1, 33)]
    spans = [(end - length, length) for end in ends]
    check(make_case(spans), sliding_window)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_several_thousand_tokens(dtype):
    check(make_case([(4999, 1), (30, 1)], dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_thousand_tokens_and_a_wide_window(dtype):
    spans = [(4999, 1), (2500, 3), (4095, 1)]
    check(make_case(spans, dtype=dtype), 1000)


@pytest.mark.parametrize("spans", [[(700, 1), (130, 1)], [(650, 3), (40, 3)]])
def test_any_number_of_splits_gives_nearly_the_same(spans, monkeypatch):
    case = make_case(spans)
    monkeypatch.setattr(attention, "_num_processors", lambda _: 1)
    whole = check(case)
    monkeypatch.setattr(attention, "_num_processors", lambda _: 1000)
    divided = check(case)
    assert not torch.equal(divided, whole)  # it was summed in another order
    torch.testing.assert_close(divided, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_caps(soft_cap, dtype):
    check(make_case(SPECULATION, soft_cap=soft_cap, dtype=dtype), 50)


def test_sinks_count_once_in_a_divided_context():
    case = make_case([(700, 1), (3, 1)], has_sinks=True)
    check(case)
    # The interpreter's numpy adds -inf without a warning.
    case.sinks[1] = -torch.inf
    check(case, 300)


@pytest.mark.parametrize("size", [10.0, 1000.0])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_scores_far_from_zero(soft_cap, size):
    case = make_case([(300, 1), (8, 2)], soft_cap=soft_cap, dtype=torch.bfloat16)
    case.query.mul_(size)
    check(case)


@settings(max_examples=8, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 2), (6, 2), (5, 1), (7, 1)]),
    head_dim=st.sampled_from([64, 80]),
    block_size=st.sampled_from([8, 16, 48]),
    sliding_window=st.none() | st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_any_step(spans, heads, sliding_window, **shape):
    check(make_case(spans, num_heads=heads[0], num_kv_heads=heads[1], **shape), sliding_window)


def test_a_step_of_no_tokens():
    case = make_case([(3, 2)])
    assert attend(replace(case, query=case.query[:0])).shape == (0, 3, 64)
