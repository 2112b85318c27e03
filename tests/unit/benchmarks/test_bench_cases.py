"""Cases and figures of `baton bench latency`."""

import pytest

from baton.common.errors import ConfigurationError
from benchmarks.model_cost import Ceilings, ModelShape, step_floor_s
from benchmarks.offline.cases import OfflineCase, RunTimes, make_cases, run_times, summarize
from benchmarks.request import MeasuredRequest

SHAPE = ModelShape(
    num_body_weights=900, num_layers=3, num_head_weights=100, num_attention_features=10
)
CEILINGS = Ceilings(read_bytes_per_s=1e6, operations_per_s=1e6)


def test_every_combination_is_a_case():
    assert make_cases([1, 2], [8], [3, 4]) == [
        OfflineCase(1, 8, 3),
        OfflineCase(1, 8, 4),
        OfflineCase(2, 8, 3),
        OfflineCase(2, 8, 4),
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (([0], [8], [3]), "--batch-size has 0"),
        (([1], [0], [3]), "--input-len has 0"),
        (([1], [8], [2]), "--output-len has 2; it must be >= 3"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ConfigurationError, match=message):
        make_cases(*sizes)


def test_prompts_of_different_seeds_share_no_first_block():
    case = OfflineCase(2, 40, 5)
    first, other = (case.requests(1000, seed=seed) for seed in (1, 2))
    assert len(first) == 2
    assert all(len(r.prompt_token_ids) == 40 and r.num_output_tokens == 5 for r in first)
    assert len({tuple(r.prompt_token_ids[:16]) for r in (*first, *other)}) == 4


def test_step_time_covers_only_steps_in_which_every_request_decodes():
    # The second one's first token comes at 0.3 s; until then the first one decodes alone.
    first = MeasuredRequest(8, 0.0, [0.1, 0.2, 0.3, 0.5, 0.7], 0.7)
    second = MeasuredRequest(8, 0.0, [0.3, 0.5, 0.7, 0.71, 0.72], 0.72)
    times = run_times([first, second])
    assert times.prefill_ms == pytest.approx(300)
    assert times.step_ms == pytest.approx(200)
    assert times.output_tokens_per_s == pytest.approx(10 / 0.72)


def test_runs_without_a_common_decode_step_or_with_a_failure_are_refused():
    first = MeasuredRequest(8, 0.0, [0.1, 0.2, 0.3], 0.3)
    second = MeasuredRequest(8, 0.0, [0.4, 0.5, 0.6], 0.6)
    with pytest.raises(ConfigurationError, match="2 requests never decode all together"):
        run_times([first, second])
    with pytest.raises(ConfigurationError, match="a request failed: lost"):
        run_times([MeasuredRequest(8, 0.0, [0.1], 0.3, error="lost")])


def test_a_summary_has_medians_and_floors():
    runs = [RunTimes(10, 1, 100), RunTimes(30, 3, 300), RunTimes(20, 2, 200)]
    result = summarize(OfflineCase(2, 4, 8), runs, SHAPE, CEILINGS)
    assert (result.prefill_ms, result.step_ms, result.output_tokens_per_s) == (20, 2, 200)
    # Two prompts of 4 tokens, attending to 1, 2, 3, 4, go through two of three layers, and the
    # last token of each through the third and the head.
    two_layers = 2 * 600 * 8 + 4 * 10 * 2 / 3 * 2 * (1 + 2 + 3 + 4)
    operations = two_layers + 2 * 300 * 2 + 4 * 10 / 3 * 2 * 4 + 2 * 100 * 2
    assert result.prefill_floor_ms == pytest.approx(1000 * operations / 1e6)
    # Half of the output adds 4 tokens to the context.
    assert result.step_floor_ms == pytest.approx(1000 * 2 * (2 * 1000 + 4 * 10 * 8) / 1e6)


def test_the_floor_of_a_single_sequence_is_its_bytes():
    wide = Ceilings(read_bytes_per_s=1e3, operations_per_s=1e9)
    assert step_floor_s(SHAPE, wide, batch_size=1, context=1) == pytest.approx(2000 / 1e3)
