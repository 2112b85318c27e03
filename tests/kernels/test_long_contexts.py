"""Attention over more positions than one segment of the native kernels has."""

from dataclasses import replace

import pytest
import torch

import kernels
from tests.support.attention_cases import make_case
from tests.support.kernel_checks import DTYPES, native_only

SPANS = [(2040, 20), (6200, 1), (2047, 1), (4096, 1), (0, 3)]
SIZES = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 8, "block_size": 16}


@pytest.mark.parametrize("sliding_window", [None, 3000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_are_merged(dtype, sliding_window):
    make_case(SPANS, dtype=dtype, has_sinks=True, **SIZES).check(sliding_window)
    case = make_case(SPANS, dtype=dtype, soft_cap=5.0, **SIZES)
    for narrow_dtype in (torch.float8_e4m3fn, torch.int8):
        case.quantized(narrow_dtype).check(sliding_window)


def _alone(case, index):
    """Returns the case with one of its sequences."""
    meta, length = case.meta, case.spans[index][1]
    first = int(meta.query_starts[index])
    alone = replace(
        meta,
        block_tables=meta.block_tables[index : index + 1],
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        context_lens=meta.context_lens[index : index + 1],
        slot_mapping=meta.slot_mapping[first : first + length],
        max_query_len=length,
    )
    rows = slice(first, first + length)
    return replace(case, query=case.query[rows], meta=alone, spans=[case.spans[index]]), rows


@native_only("torch's bits may depend on its threads")
@pytest.mark.parametrize("sliding_window", [None, 3000])
def test_a_result_depends_neither_on_threads_nor_on_other_sequences(sliding_window):
    """One sequence alone has a unit per segment, and several on one thread have one each."""
    case = make_case(SPANS, dtype=torch.bfloat16, has_sinks=True, **SIZES)
    before = kernels.num_threads()
    try:
        kernels.set_num_threads(1)
        together = case.attend(sliding_window)
        kernels.set_num_threads(3)
        assert torch.equal(case.attend(sliding_window), together)
        for index in range(len(SPANS)):
            alone, rows = _alone(case, index)
            assert torch.equal(alone.attend(sliding_window), together[rows])
    finally:
        kernels.set_num_threads(before)
