"""Triton's paged attention of prompts, and of steps that mix them with decoding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.triton_attention import check, make_case

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.sampled(one_in=2)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXES = {
    "prompts": [(0, 70), (0, 1), (0, 33)],
    "cached prefix": [(90, 25), (3, 30), (64, 64)],
    "mixed": [(120, 1), (0, 29), (30, 1), (65, 6), (0, 1), (4, 2), (100, 40)],
}
# One head gives the same tiles in less time.
ONE_HEAD = {"num_heads": 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
def test_types(mix, dtype):
    check(make_case(MIXES[mix], dtype=dtype))


@pytest.mark.parametrize("sliding_window", [1, 7, 64, 65, 1000])
def test_windows(sliding_window):
    spans = [(120, 1), *MIXES["cached prefix"]]
    check(make_case(spans, dtype=torch.bfloat16, **ONE_HEAD), sliding_window)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (14, 2), (8, 1), (33, 1), (80, 1)])
def test_heads(heads):
    spans = [(12, 1), (0, 9), (30, 11)]
    check(make_case(spans, num_heads=heads[0], num_kv_heads=heads[1], dtype=torch.bfloat16))


@pytest.mark.parametrize("head_dim", [5, 64, 80, 128, 256])
def test_head_sizes(head_dim):
    spans = [(20, 1), (70, 40)]
    check(make_case(spans, head_dim=head_dim, dtype=torch.bfloat16, **ONE_HEAD))


@pytest.mark.parametrize("block_size", [1, 8, 48])
def test_block_sizes(block_size):
    spans = MIXES["cached prefix"]
    check(make_case(spans, block_size=block_size, dtype=torch.bfloat16, **ONE_HEAD))


@pytest.mark.parametrize("length", [63, 64, 65, pytest.param(129, marks=pytest.mark.slow)])
def test_prompts_around_the_ends_of_blocks_and_tiles(length):
    spans = [(0, length), (64 - length % 64, length)]
    check(make_case(spans, dtype=torch.bfloat16, **ONE_HEAD))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("sliding_window", [None, pytest.param(500, marks=pytest.mark.slow)])
def test_chunks_that_share_a_long_context(sliding_window, dtype):
    # One small chunk leaves processors idle, so that its context is divided.
    case = make_case([(1500, 40), (800, 1), (3, 1)], num_heads=2, num_kv_heads=1, dtype=dtype)
    check(case, sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_soft_caps(sliding_window):
    case = make_case(MIXES["cached prefix"], soft_cap=5.0, dtype=torch.bfloat16, **ONE_HEAD)
    check(case, sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_sinks(sliding_window):
    check(make_case(MIXES["mixed"], has_sinks=True, dtype=torch.bfloat16), sliding_window)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 50)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 2), (3, 1), (7, 1)]),
    head_dim=st.sampled_from([64, 80]),
    block_size=st.sampled_from([8, 16, 48]),
    sliding_window=st.none() | st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_any_step(spans, heads, sliding_window, **shape):
    check(make_case(spans, num_heads=heads[0], num_kv_heads=heads[1], **shape), sliding_window)
