"""Parts of `baton bench kernels` that time nothing: costs, limits, cycles, checks, tables."""

import pytest
import torch

from benchmarks.ceilings import Rates
from benchmarks.kernels.attention import BLOCK_SIZE, step_metadata
from benchmarks.kernels.case import (
    ByteSpan,
    Cost,
    DecoderShape,
    attention_cost,
    limit_s,
    product_cost,
)
from benchmarks.kernels.measure import PRIMITIVES, KernelOutcome, find_difference, make_cases
from benchmarks.kernels.timing import Cycle, last_level_cache_bytes, median_call_s, plan_cycle
from benchmarks.kernels_command import make_tables, to_plain
from benchmarks.model_cost import Ceilings
from benchmarks.models import RANDOM_MODELS

LLAMA = DecoderShape.of_config(RANDOM_MODELS["llama-100m"][1])
CEILINGS = Ceilings(read_bytes_per_s=100.0, operations_per_s=1000.0)


def attention(spans, window=None):
    return attention_cost(spans, num_query_features=3, kv_bytes_per_token=10, sliding_window=window)


def visible_pairs(span, window):
    """Lists by brute force the keys that each query attends to."""
    return {
        (query, key)
        for query in range(span.num_cached, span.context)
        for key in range(query + 1)
        if window is None or query - key < window
    }


def test_a_product_reads_its_weight_once():
    assert product_cost(4, 10, 3, bytes_per_weight=2) == Cost(60, 240)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(
    "span", [ByteSpan(0, 1), ByteSpan(9, 1), ByteSpan(0, 6), ByteSpan(8, 5), ByteSpan(2, 8)]
)
def test_attention_reads_each_visible_key_once(span, window):
    seen = visible_pairs(span, window)
    expected = Cost(10 * len({key for _, key in seen}), 4 * 3 * len(seen))
    assert attention([span], window) == expected
    twice = Cost(2 * expected.num_bytes, 2 * expected.num_operations)
    assert attention([span, span], window) == twice


def test_the_limit_is_the_longer_of_reading_and_computing():
    assert limit_s(Cost(200, 100), CEILINGS) == 2.0
    assert limit_s(Cost(200, 5000), CEILINGS) == 5.0


def test_a_cycle_overflows_the_cache_or_is_swept():
    assert plan_cycle(1000, None, 10_000) == Cycle(40, must_sweep=False)
    assert plan_cycle(1 << 30, None, 10_000) == Cycle(2, must_sweep=False)
    assert plan_cycle(1, None, 10_000) == Cycle(256, must_sweep=True)
    assert plan_cycle(1000, 8, 10_000) == Cycle(8, must_sweep=True)


def test_the_last_level_cache_is_the_largest(tmp_path):
    assert last_level_cache_bytes(tmp_path) == 32 << 20
    for index, size in enumerate(("32K", "1024K", "96M", "48K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_level_cache_bytes(tmp_path) == 96 << 20


def test_the_better_of_two_rates_is_chosen_per_kind():
    assert Rates(1.0, 5.0, 2.0).or_better(Rates(3.0, 4.0, 2.0)) == Rates(3.0, 5.0, 2.0)


def test_rounding_errors_pass_and_wrong_elements_fail():
    expected = torch.randn((8, 64), generator=torch.Generator().manual_seed(0))
    assert find_difference(expected.bfloat16(), expected, torch.bfloat16, 64) is None
    assert find_difference(expected.bfloat16(), expected, torch.float32, 64) is not None
    wrong = expected.clone()
    wrong[3, 7] += 0.5
    found = find_difference(wrong, expected, torch.bfloat16, 64)
    assert found == "result 0: 1 of 512 elements are off, by up to 0.5"
    wrong[3, 7] = torch.nan
    assert find_difference(wrong, expected, torch.bfloat16, 64) is not None


def test_integers_and_shapes_must_be_equal():
    maxima, indices = torch.ones(3), torch.tensor([1, 2, 3])
    assert find_difference((maxima, indices), (maxima, indices), torch.float32, 1) is None
    other = (maxima, torch.tensor([1, 2, 4]))
    found = find_difference(other, (maxima, indices), torch.float32, 1)
    assert found == "result 1: 1 of 3 integers differ"
    assert "has shape (2,), not (3,)" in find_difference(maxima[:2], maxima, torch.float32, 1)


def test_sequences_of_a_step_share_no_block():
    spans = [ByteSpan(20, 5), ByteSpan(0, 17), ByteSpan(39, 1)]
    meta, num_blocks = step_metadata(spans)
    assert num_blocks == 2 + 2 + 3
    used = [
        int(block)
        for table, span in zip(meta.block_tables, spans, strict=True)
        for block in table[: -(-span.context // BLOCK_SIZE)]
    ]
    assert sorted(used) == list(range(num_blocks))
    assert meta.query_starts.tolist() == [0, 5, 22, 23]
    assert meta.context_lens.tolist() == [25, 17, 40]
    assert len(set(meta.slot_mapping.tolist())) == 23
    assert meta.slot_mapping[-1] == used[-1] * BLOCK_SIZE + 39 % BLOCK_SIZE


def test_every_primitive_has_cases_of_the_model():
    cases = make_cases(list(PRIMITIVES), LLAMA, torch.bfloat16)
    assert {case.primitive for case in cases} == set(PRIMITIVES)
    assert len({(case.primitive, case.what, case.size) for case in cases}) == len(cases)
    costs = {(case.primitive, case.what, case.size): case.cost for case in cases}
    qkv = costs["linear", "qkv 1280 x 768", "16 rows"]
    assert qkv == Cost(2 * 1280 * 768, 2 * 16 * 1280 * 768)
    assert costs["paged_attention", "decode", "16 x 512"].num_bytes == 16 * 512 * 2 * 4 * 64 * 2


def test_timed_calls_are_made_in_turn_with_sweeps(monkeypatch):
    monkeypatch.setattr("benchmarks.kernels.timing._MIN_SECONDS", 0.0)
    monkeypatch.setattr("benchmarks.kernels.timing._WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr("benchmarks.kernels.timing._BATCH_SECONDS", 0.0)
    made, sweeps = [], []
    calls = [lambda index=index: made.append(index) for index in range(4)]
    seconds = median_call_s(calls, is_recordable=False, sweep=lambda: sweeps.append(1))
    assert seconds > 0
    assert made == [3, 3, *(index % 4 for index in range(10))]
    assert len(sweeps) == 9


def test_wrong_results_have_no_figures():
    good = KernelOutcome("linear", "qkv", "1 row", Cost(200, 100), kernel_s=4.0, reference_s=6.0)
    wrong = KernelOutcome("linear", "qkv", "4 rows", Cost(200, 100), difference="all is off")
    (table,) = make_tables([good, wrong], CEILINGS)
    rates = [200 / 4 / 1e9, 100 / 4 / 1e9]
    assert table.rows[0] == ["qkv", "1 row", 4e6, *rates, 2e6, 2.0, 6e6, 1.5]
    assert table.rows[1] == ["qkv", "4 rows", None, None, None, 2e6, None, None, None]
    assert "qkv, 4 rows: all is off" in table.note
    assert to_plain(good, CEILINGS)["limit_s"] == 2.0


def test_times_well_below_the_limit_are_noted():
    def note(kernel_s):
        outcome = KernelOutcome("linear", "qkv", "1 row", Cost(200, 100), kernel_s, reference_s=6.0)
        (table,) = make_tables([outcome], CEILINGS)
        return table.note

    assert note(1.9) == ""
    assert "Faster than the limit" in note(1.5)
