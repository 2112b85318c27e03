"""Paged attention against a row-by-row oracle in float64, over pools full of NaN."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import reference
from kernels.attention_metadata import AttentionMetadata
from tests.support.paged_batches import shuffled_tables, step_metadata


@dataclass(frozen=True)
class Case:
    """A step whose KV is in a NaN-filled pool of several layers, and the same KV laid plain."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    pool: torch.Tensor
    meta: AttentionMetadata
    contexts: list[tuple[torch.Tensor, torch.Tensor]]  # per sequence [context, kv heads, dim]
    spans: list[tuple[int, int]]

    @property
    def kv_layer(self) -> torch.Tensor:
        return self.pool[:, 1]

    def attend(self, sliding_window: int | None = None) -> torch.Tensor:
        return kernels.paged_attention(
            self.query, self.kv_layer, self.meta, scale=0.3, sliding_window=sliding_window
        )

    def expected(self, sliding_window: int | None = None) -> torch.Tensor:
        rows = []
        for (start, length), (keys, values) in zip(self.spans, self.contexts, strict=True):
            for position in range(start, start + length):
                query = self.query[len(rows)].double()
                low = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                rows.append(
                    _attend_row(query, keys[low : position + 1], values[low : position + 1])
                )
        return torch.stack(rows)


def _attend_row(query, keys, values):
    group_size = len(query) // keys.shape[1]
    keys = keys.double().repeat_interleave(group_size, dim=1)
    values = values.double().repeat_interleave(group_size, dim=1)
    weights = (torch.einsum("hd,chd->hc", query, keys) * 0.3).softmax(-1)
    return torch.einsum("hc,chd->hd", weights, values)


def make_case(
    spans, *, num_heads=6, num_kv_heads=2, head_dim=5, block_size=4, dtype=torch.float32, seed=0
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    tables, num_blocks = shuffled_tables([sum(span) for span in spans], block_size, seed)
    pool = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), float("nan"))
    pool = pool.to(dtype)
    contexts = []
    for (start, length), table in zip(spans, tables, strict=True):
        keys, values = (normal(start + length, num_kv_heads, head_dim) for _ in range(2))
        contexts.append((keys, values))
        _, whole = step_metadata([(0, start + length)], [table], block_size)
        reference.write_kv(keys, values, pool[:, 1], whole.slot_mapping)
    _, meta = step_metadata(spans, tables, block_size)
    query = normal(sum(length for _, length in spans), num_heads, head_dim)
    return Case(query, pool, meta, contexts, spans)


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
def test_matches_the_oracle(mix, sliding_window):
    case = make_case(MIXES[mix])
    torch.testing.assert_close(
        case.attend(sliding_window).double(), case.expected(sliding_window), atol=2e-6, rtol=2e-6
    )


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (5, 1)]),
    head_dim=st.sampled_from([1, 3, 8]),
    block_size=st.sampled_from([1, 3, 8, 16]),
    sliding_window=st.none() | st.integers(1, 12),
)
def test_matches_the_oracle_for_any_shape(spans, heads, head_dim, block_size, sliding_window):
    case = make_case(
        spans, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size
    )
    torch.testing.assert_close(
        case.attend(sliding_window).double(), case.expected(sliding_window), atol=5e-6, rtol=5e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_stay_within_their_rounding(dtype):
    case = make_case(MIXES["mixed"], head_dim=16, dtype=dtype)
    output = case.attend()
    assert output.dtype == dtype
    # One rounding of the output, and of each weight that is summed.
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), case.expected(), atol=tolerance, rtol=tolerance)


def test_decode_rows_in_several_passes_are_the_same(monkeypatch):
    case = make_case(MIXES["decode"])
    whole = case.attend()
    monkeypatch.setattr(reference, "_MAX_GATHERED_ELEMENTS", 1000)
    torch.testing.assert_close(case.attend(), whole, atol=1e-6, rtol=1e-6)


def test_slots_before_the_window_may_hold_anything():
    case = make_case([(20, 1), (17, 6)])
    expected = case.expected(sliding_window=5)
    first_seen = [16, 13]
    for table, first in zip(case.meta.block_tables, first_seen, strict=True):
        for position in range(first):
            case.kv_layer[table[position // 4], :, :, position % 4] = float("nan")
    torch.testing.assert_close(case.attend(5).double(), expected, atol=2e-6, rtol=2e-6)


def test_an_empty_context_yields_zeros_and_spoils_no_neighbour():
    case = make_case([(6, 1), (0, 1)])
    emptied = replace(case.meta, context_lens=torch.tensor([7, 0], dtype=torch.int32))
    output = replace(case, meta=emptied).attend()
    torch.testing.assert_close(output[0].double(), case.expected()[0], atol=2e-6, rtol=2e-6)
    assert torch.equal(output[1], torch.zeros_like(output[1]))


def test_a_rows_result_hardly_depends_on_its_neighbours():
    alone = make_case([(21, 1)], seed=3)
    crowd = make_case([(21, 1), (90, 1), (2, 1)], seed=3)
    # The same first sequence, laid into the crowd's pool.
    table = crowd.meta.block_tables[:1]
    _, whole = step_metadata([(0, 22)], [table[0].tolist()], 4)
    reference.write_kv(*alone.contexts[0], crowd.kv_layer, whole.slot_mapping)
    query = torch.cat([alone.query, crowd.query[1:]])
    crowded = replace(crowd, query=query).attend()[0]
    torch.testing.assert_close(crowded, alone.attend()[0], atol=3e-7, rtol=3e-7)


def test_attention_leaves_the_pool_as_it_was():
    case = make_case(MIXES["mixed"])
    before = case.pool.clone()
    case.attend(sliding_window=3)
    assert torch.equal(case.pool.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_writes_its_slots_and_no_others(dtype):
    pool = torch.full((5, 3, 2, 2, 4, 3), -1.0, dtype=dtype)
    key, value = torch.randn(2, 6, 2, 3).to(dtype)
    slots = torch.tensor([7, 0, 19, 4, 12, 13])
    reference.write_kv(key, value, pool[:, 2], slots)
    for token, slot in enumerate(slots.tolist()):
        written = pool[slot // 4, 2, :, :, slot % 4]
        assert torch.equal(written, torch.stack([key[token], value[token]]))
        written.fill_(-1.0)
    assert (pool == -1).all()
