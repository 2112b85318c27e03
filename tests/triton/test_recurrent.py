"""Kernels of recurrent layers in Triton: results against float64, and which slots they store."""

import pytest
import torch

from kernels.triton import recurrent
from tests.support.devices import DEVICE, rounding_error
from tests.support.state_cases import check_conv, conv_case, state_step

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.sampled(one_in=2)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(case, spans, tables, block_size, *, num_slots=10, slices=1, heads=None, unkept=None):
    return check_conv(
        recurrent.short_conv,
        case,
        case.slots(num_slots, slices, heads).to(DEVICE),
        spans,
        tables,
        block_size,
        unkept=unkept,
        rounding=rounding_error(case.weight.dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "width"), [(1, 2), (33, 3), (260, 4)])
def test_short_conv_of_single_tokens(channels, width, dtype):
    case = conv_case([9, 1, 8, 2], channels, width, dtype, has_bias=True)
    tables = [[-1, 1, 2], [3], [-1, 4], [5]]
    check(case, [(8, 1), (0, 1), (7, 1), (1, 1)], tables, block_size=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "width"), [(1, 2), (33, 3), (12, 6)])
def test_short_conv_of_prompts(channels, width, dtype):
    spans = [(0, 9), (6, 1), (3, 30), (15, 17)]
    case = conv_case([start + length for start, length in spans], channels, width, dtype)
    # The last sequence's slot moves from its second block to its last one.
    tables = [[1, -1, 2], [-1, 3], [4, 5, -1, -1, -1, -1, -1, 6, 7], [-1, -1, -1, 8, -1, 9, -1, 8]]
    check(case, spans, tables, block_size=4)
    check(case, spans, tables, block_size=4, unkept=[8, 0, 14, 1])


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
        rows = case.gates[0][start : start + length].to(DEVICE)
        parts.append(recurrent.short_conv(rows, case.weight.to(DEVICE), None, state))
        start += length
    assert torch.equal(torch.cat(parts), whole)
