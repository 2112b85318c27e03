"""The search of `baton tune`, with formulas for goodput instead of clusters."""

import math

import pytest

from benchmarks.tune.search import AXES, Candidate, SearchSettings, Trial, climb, coordinate_search

START = Candidate(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    long_prefill_token_threshold=None,
    num_prefill=1,
    num_decode=1,
)
SETTINGS = SearchSettings(start_rate=1.0)


def run(search, objective, limit=400):
    """Runs a search on an objective; returns its result and all trials."""
    trials = []
    try:
        trial = next(search)
        while True:
            trials.append(trial)
            assert len(trials) <= limit, "the search does not end"
            trial = search.send(objective(trial))
    except StopIteration as end:
        return end.value, trials


def saturating(capacity):
    """Returns a goodput function that rises up to the capacity and falls beyond it."""

    def goodput(trial):
        rate = trial.request_rate
        return rate if rate <= capacity else capacity * math.exp(-(rate / capacity - 1))

    return goodput


@pytest.mark.parametrize("capacity", [0.01, 0.3, 1.0, 7.7, 200.0])
def test_climb_finds_the_rate_at_which_goodput_begins_to_fall(capacity):
    curve, trials = run(climb(START, 1.0, SETTINGS), saturating(capacity))
    best_rate = max(curve, key=curve.get)
    assert capacity / SETTINGS.resolution <= best_rate <= capacity * SETTINGS.resolution
    assert len(trials) == len({t.request_rate for t in trials}) <= 20


def test_climbing_ends_if_no_rate_has_goodput():
    curve, trials = run(climb(START, 1.0, SETTINGS), lambda trial: 0.0)
    assert set(curve.values()) == {0.0}
    assert len(trials) == 1 + SETTINGS.max_doublings
    assert max(curve) == 1.0


def test_climb_ends_if_goodput_never_falls():
    curve, trials = run(climb(START, 1.0, SETTINGS), lambda trial: trial.request_rate)
    assert max(curve) == 2.0**SETTINGS.max_doublings
    assert len(trials) < 20


def test_a_hopeless_candidate_costs_one_trial():
    curve, trials = run(climb(START, 4.0, SETTINGS, at_least=3.0), lambda trial: 2.9)
    assert curve == {4.0: 2.9}
    assert trials == [Trial(START, 4.0)]


def capacity_of(candidate):
    """Returns a capacity, highest at 16 sequences, 512 tokens, chunks of 128 and 3:1 workers."""
    threshold = candidate.long_prefill_token_threshold or candidate.max_num_batched_tokens
    distance = (
        abs(math.log2(candidate.max_num_seqs / 16))
        + abs(math.log2(candidate.max_num_batched_tokens / 512))
        + abs(math.log2(threshold / 128))
        + 2 * abs(candidate.num_prefill - 3)
    )
    return 20 * 0.8**distance


def test_the_search_finds_the_best_of_all_axes():
    start = Candidate(64, 2048, None, 1, 3)
    best, trials = run(
        coordinate_search(start, AXES, SETTINGS),
        lambda trial: saturating(capacity_of(trial.candidate))(trial),
        limit=1000,
    )
    assert best == Candidate(16, 512, 128, 3, 1)
    assert trials[0] == Trial(start, 1.0)
    assert len({trial.candidate for trial in trials}) < 40


def test_the_search_stays_at_a_start_without_better_neighbours():
    best, trials = run(coordinate_search(START, AXES, SETTINGS), saturating(5.0))
    assert best == START
    neighbours = {trial.candidate for trial in trials} - {START}
    assert len(neighbours) == len(
        [1 for axis in AXES for step in (-1, 1) if axis(START, step) is not None]
    )


@pytest.mark.parametrize(("gain", "moves"), [(1.02, False), (1.05, True)])
def test_gains_within_noise_do_not_move_the_search(gain, moves):
    best, _ = run(
        coordinate_search(START, AXES, SETTINGS),
        lambda trial: saturating(5.0)(trial) * (gain if trial.candidate != START else 1.0),
    )
    assert (best != START) is moves


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("direction", [-1, 1])
def test_axes_are_bounded_and_reversible(axis, direction):
    candidate, steps = Candidate(64, 2048, 256, 2, 2), 0
    while (neighbour := axis(candidate, direction)) is not None:
        assert axis(neighbour, -direction) == candidate
        assert neighbour.num_prefill + neighbour.num_decode == 4
        assert neighbour.num_decode >= 1
        assert neighbour.max_num_seqs <= neighbour.max_num_batched_tokens
        threshold = neighbour.long_prefill_token_threshold
        assert threshold is None or threshold < neighbour.max_num_batched_tokens
        candidate, steps = neighbour, steps + 1
        assert steps < 20


def test_a_candidate_is_printed_with_its_settings():
    assert str(START) == "1:1, seqs 64, tokens 2048, chunk any"
