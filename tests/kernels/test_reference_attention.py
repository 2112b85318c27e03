"""The reference's paged attention against float64, over pools full of NaN."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.reference import attention, cache
from tests.support.attention_cases import make_case
from tests.support.paged_batches import step_metadata


def attend(case, sliding_window=None):
    return case.attend(sliding_window, module=reference)


MIXES = {
    "one token": [(0, 1)],
    "one prompt": [(0, 13)],
    "block edges": [(0, 3), (0, 4), (0, 5)],
    "cached prefix": [(8, 5), (3, 2), (4, 4)],
    "decode": [(0, 1), (7, 1), (40, 1), (3, 1), (4, 1), (9, 1)],
    "mixed": [(12, 1), (0, 9), (30, 1), (5, 6), (0, 1), (4, 2)],
}


@pytest.mark.parametrize("sliding_window", [None, 1, 2, 4, 7, 1000])
@pytest.mark.parametrize("mix", MIXES)
def test_attention_matches_the_oracle(mix, sliding_window):
    case = make_case(MIXES[mix])
    torch.testing.assert_close(
        attend(case, sliding_window).double(), case.expected(sliding_window), atol=2e-6, rtol=2e-6
    )


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (5, 1)]),
    head_dim=st.sampled_from([1, 3, 8]),
    block_size=st.sampled_from([1, 3, 8, 16]),
    sliding_window=st.none() | st.integers(1, 12),
)
def test_attention_matches_the_oracle_for_any_shape(
    spans, heads, head_dim, block_size, sliding_window
):
    case = make_case(
        spans, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size
    )
    torch.testing.assert_close(
        attend(case, sliding_window).double(), case.expected(sliding_window), atol=5e-6, rtol=5e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_stay_within_their_rounding(dtype):
    case = make_case(MIXES["mixed"], head_dim=16, dtype=dtype)
    output = attend(case)
    assert output.dtype == dtype
    # One rounding of the output, and of each weight that is summed.
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), case.expected(), atol=tolerance, rtol=tolerance)


def test_decode_rows_in_several_passes_give_the_same_result(monkeypatch):
    case = make_case(MIXES["decode"])
    whole = attend(case)
    monkeypatch.setattr(attention, "_MAX_GATHERED_ELEMENTS", 1000)
    torch.testing.assert_close(attend(case), whole, atol=1e-6, rtol=1e-6)


def test_slots_before_the_window_may_hold_anything():
    case = make_case([(20, 1), (17, 6)])
    expected = case.expected(sliding_window=5)
    first_seen = [16, 13]
    for table, first in zip(case.meta.block_tables, first_seen, strict=True):
        for position in range(first):
            case.kv_layer[table[position // 4], :, :, position % 4] = float("nan")
    torch.testing.assert_close(attend(case, 5).double(), expected, atol=2e-6, rtol=2e-6)


def test_an_empty_context_yields_zeros_and_does_not_affect_others():
    case = make_case([(6, 1), (0, 1)])
    emptied = replace(case.meta, context_lens=torch.tensor([7, 0], dtype=torch.int32))
    output = attend(replace(case, meta=emptied))
    torch.testing.assert_close(output[0].double(), case.expected()[0], atol=2e-6, rtol=2e-6)
    assert torch.equal(output[1], torch.zeros_like(output[1]))


def test_a_rows_result_is_nearly_independent_of_other_rows():
    alone = make_case([(21, 1)], seed=3)
    crowd = make_case([(21, 1), (90, 1), (2, 1)], seed=3)
    # The crowd's first sequence gets the KV of `alone`.
    table = crowd.meta.block_tables[:1]
    _, whole = step_metadata([(0, 22)], [table[0].tolist()], 4)
    cache.write_kv(alone.contexts[0], crowd.kv_layer, whole.slot_mapping)
    query = torch.cat([alone.query, crowd.query[1:]])
    crowded = attend(replace(crowd, query=query))[0]
    torch.testing.assert_close(crowded, attend(alone)[0], atol=3e-7, rtol=3e-7)


def test_attention_does_not_change_the_pool():
    case = make_case(MIXES["mixed"])
    before = case.pool.clone()
    attend(case, sliding_window=3)
    assert torch.equal(case.pool.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_writes_its_slots_and_no_others(dtype):
    pool = torch.full((5, 3, 2, 2, 4, 3), -1.0, dtype=dtype)
    key, value = torch.randn(2, 6, 2, 3).to(dtype)
    slots = torch.tensor([7, 0, 19, 4, 12, 13])
    cache.write_kv((key, value), pool[:, 2], slots)
    for token, slot in enumerate(slots.tolist()):
        written = pool[slot // 4, 2, :, :, slot % 4]
        assert torch.equal(written, torch.stack([key[token], value[token]]))
        written.fill_(-1.0)
    assert (pool == -1).all()
