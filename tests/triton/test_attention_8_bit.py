"""Triton's paged attention over a cache of 8-bit elements."""

from dataclasses import replace

import pytest
import torch

from kernels import reference
from tests.support.devices import DEVICE
from tests.support.triton_attention import attend, check, make_case

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.sampled(one_in=2)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NARROW_DTYPES = [torch.float8_e4m3fn, torch.int8]
DECODE = [(0, 1), (30, 1), (300, 1), (130, 3)]
MIXED = [(120, 1), (0, 29), (30, 1), (65, 6), (0, 1)]


@pytest.mark.parametrize(
    ("spans", "dtype", "narrow_dtype"),
    [
        *((DECODE, dtype, NARROW_DTYPES[0]) for dtype in DTYPES),
        *((DECODE, dtype, NARROW_DTYPES[1]) for dtype in DTYPES),
        (MIXED, torch.bfloat16, NARROW_DTYPES[1]),
        *(pytest.param(MIXED, dtype, NARROW_DTYPES[0], marks=pytest.mark.slow) for dtype in DTYPES),
    ],
)
def test_attention_reads_the_stored_values(spans, dtype, narrow_dtype):
    check(make_case(spans, dtype=dtype).quantized(narrow_dtype))


@pytest.mark.parametrize(
    ("spans", "narrow_dtype"), [(DECODE, torch.float8_e4m3fn), (MIXED, torch.int8)]
)
def test_attention_with_a_window_a_soft_cap_and_sinks(spans, narrow_dtype):
    case = make_case(spans, soft_cap=5.0, has_sinks=True, dtype=torch.bfloat16)
    check(case.with_freed_blocks(40).quantized(narrow_dtype), 40)


@pytest.mark.parametrize("head_dim", [80, 128])
def test_head_sizes(head_dim):
    check(make_case(MIXED, head_dim=head_dim, block_size=8, dtype=torch.bfloat16).quantized())


def test_attention_matches_the_reference():
    case = make_case(MIXED).quantized()
    expected = case.attend(module=reference)
    torch.testing.assert_close(attend(case).cpu(), expected, atol=2e-6, rtol=2e-5)


def test_attention_is_close_to_that_without_quantization():
    case = make_case([(300, 1), (50, 40)], dtype=torch.bfloat16)
    expected = case.expected()
    error = attend(case.quantized()).double().cpu() - expected
    # Three bits of mantissa: each number is off by up to 1/16 of itself, and they average out.
    assert error.norm() < expected.norm() / 16


def test_scales_may_have_another_memory_order():
    case = make_case(MIXED, dtype=torch.bfloat16).quantized()
    expected = attend(case)
    scales_pool = case.scales_pool.transpose(2, 4).contiguous().transpose(2, 4)
    moved = replace(case.on(DEVICE), scales_pool=scales_pool.to(DEVICE))
    assert moved.scales_pool.stride() == scales_pool.stride()
    assert torch.equal(attend(moved), expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("spans", "narrow_dtype"), [(DECODE, torch.float8_e4m3fn), (MIXED, torch.int8)]
)
def test_a_non_finite_sequence_does_not_affect_others(spans, narrow_dtype):
    case = make_case(spans, dtype=torch.bfloat16)
    expected = attend(case.quantized(narrow_dtype))
    first, last = case.meta.query_starts[3:5].tolist()
    case.pool[case.meta.block_tables[3, 0].long()] = torch.nan
    output = attend(case.quantized(narrow_dtype))
    assert output[first:last].isnan().all()
    others = [row for row in range(len(output)) if not first <= row < last]
    torch.testing.assert_close(output[others], expected[others], atol=0, rtol=0)


def test_missing_scales_are_refused():
    quantized = make_case(DECODE, dtype=torch.bfloat16).quantized()
    with pytest.raises(AssertionError):
        attend(replace(quantized, scales_pool=None))
