"""Kernels of recurrent layers in Triton: results against float64, and which slots they store."""

import pytest
import torch

from kernels.triton import recurrent
from tests.support.devices import DEVICE, rounding_error
from tests.support.state_cases import (
    check_conv,
    check_delta,
    conv_case,
    delta_case,
    poisoned_slots,
    state_step,
)

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.sampled(one_in=3)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(case, spans, tables, block_size, *, num_slots=10, slices=1, heads=None, unkept=None):
    return check_conv(
        recurrent.short_conv if case.is_gated else recurrent.conv_silu,
        case,
        case.slots(num_slots, slices, heads).to(DEVICE),
        spans,
        tables,
        block_size,
        unkept=unkept,
        rounding=rounding_error(case.weight.dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(("channels", "width"), [(1, 2), (33, 3), (260, 4)])
def test_convolutions_of_single_tokens(channels, width, is_gated, dtype):
    case = conv_case([9, 1, 8, 2], channels, width, dtype, has_bias=True, is_gated=is_gated)
    tables = [[-1, 1, 2], [3], [-1, 4], [5]]
    check(case, [(8, 1), (0, 1), (7, 1), (1, 1)], tables, block_size=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "width", "is_gated"), [(1, 2, True), (33, 3, True), (12, 6, True), (12, 4, False)]
)
def test_convolutions_of_prompts(channels, width, is_gated, dtype):
    spans = [(0, 9), (6, 1), (0, 0), (3, 30), (15, 17)]
    lengths = [start + length for start, length in spans]
    case = conv_case(lengths, channels, width, dtype, is_gated=is_gated)
    # The last sequence's slot moves from its second block to its last one.
    long = [4, 5, -1, -1, -1, -1, -1, 6, 7]
    tables = [[1, -1, 2], [-1, 3], [0], long, [-1, -1, -1, 8, -1, 9, -1, 8]]
    check(case, spans, tables, block_size=4)
    check(case, spans, tables, block_size=4, unkept=[8, 0, 0, 14, 1])


def test_states_in_head_slices():
    case = conv_case([20, 11], 24, 4, torch.bfloat16)
    for slices, heads in ((3, 8), (2, 3), (4, 1)):
        tables = [[1, -1, 2], [3, 4]]
        check(case, [(5, 15), (9, 2)], tables, block_size=8, slices=slices, heads=heads)


def test_chunks_give_the_results_of_a_whole_prompt():
    case = conv_case([70], 37, 3, torch.bfloat16)
    whole = check(case, [(0, 70)], [[0] * 18], block_size=4)
    states, start, parts = case.slots(1).to(DEVICE), 0, []
    for length in (3, 1, 5, 60, 1):
        state = state_step([(start, length)], [[0] * 18], 4, (states,))
        rows = case.rows_of[0][start : start + length].to(DEVICE)
        parts.append(recurrent.short_conv(rows, case.weight.to(DEVICE), None, state))
        start += length
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1, 1, 1), (2, 4, 17, 5), (1, 2, 8, 33)])
def test_gated_delta(heads, dtype):
    names = ("num_key_heads", "num_heads", "key_dim", "value_dim")
    spans = [(0, 9), (6, 1), (0, 0), (3, 14), (0, 1)]
    lengths = [start + length for start, length in spans]
    case = delta_case(lengths, **dict(zip(names, heads, strict=True)), dtype=dtype)
    num_slices = heads[1] // heads[0]
    slots = poisoned_slots(8, num_slices, heads[0], heads[2] * heads[3], torch.float32)
    check_delta(
        recurrent.gated_delta,
        case,
        slots.to(DEVICE),
        spans,
        [[1, -1, 2], [-1, 3], [0], [4, 5, -1, -1, 4], [6]],
        4,
        unkept=[2, 0, 0, 5, 0],
        rounding=rounding_error(dtype),
    )
