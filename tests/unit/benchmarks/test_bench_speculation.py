"""Prompts and figures of `baton bench speculation`."""

import pytest

from benchmarks.offline.speculation import Round, compare_rounds
from benchmarks.offline.speculation_prompts import NUM_TEMPLATES, WORKLOADS, fill_template
from benchmarks.speculation_command import _comparison_row


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_number_has_another_prompt(workload):
    assert len(WORKLOADS[workload]) == NUM_TEMPLATES
    texts = [fill_template(workload, number) for number in range(400)]
    assert len(set(texts)) == 400
    assert texts[7] == fill_template(workload, 7)
    assert not [text for text in texts if "$" in text]


def runs_of(seconds, num_draws, token=5):
    """A round that does not count, and as many rounds of 6 tokens as there are seconds."""
    return [
        Round([[1, 2], [3, 4, token, 6]], num_draws, 3, 1, duration_s)
        for duration_s in (100.0, *seconds)
    ]


def test_a_comparison_has_medians_of_the_rounds_that_count():
    plain = runs_of((1.0, 2.0, 3.0), num_draws=6)
    drafting = runs_of((0.5, 2.0, 1.0), num_draws=4)
    result = compare_rounds("ordinary", 2, "ngram", plain, drafting)
    assert (result.tokens_per_s_without, result.tokens_per_s_with) == (3.0, 6.0)
    assert (result.ratios, result.ratio) == ((2.0, 1.0, 3.0), 2.0)
    assert (result.num_drafts, result.num_accepted) == (12, 9)
    assert result.tokens_per_step == 1.5
    assert _comparison_row(result)[-3:] == ["75%", 1.5, "equal"]


def test_other_tokens_are_counted_and_leave_no_figures():
    plain, drafting = runs_of((1.0,), 6), runs_of((1.0,), 6, token=9)
    result = compare_rounds("ordinary", 2, "ngram", plain, drafting)
    assert result.num_differing == 2  # that of the first round counts, too
    assert _comparison_row(result) == ["ordinary", 2, "ngram", *[None] * 7, "2 differ"]
