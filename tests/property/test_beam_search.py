"""Beam search over random tables of log-probabilities, compared with exhaustive search."""

from itertools import product
from math import fsum
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.request.sampling_params import SamplingParams
from engine.groups.beam_search import BeamSearch

SCORING = st.builds(
    dict,
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)


class Table:
    """A log-probability for every token after every prefix; few distinct ones, so many ties."""

    def __init__(self, vocab_size, seed, num_values):
        self.vocab_size = vocab_size
        self._seed = seed
        self._num_values = num_values

    def logprob(self, prefix, token_id):
        drawn = Random(f"{self._seed} {prefix} {token_id}").randrange(self._num_values)
        return -0.01 - 4 * drawn / self._num_values

    def report(self, prefix, num_top):
        logprobs = {token_id: self.logprob(prefix, token_id) for token_id in range(self.vocab_size)}
        return sorted(logprobs.items(), key=lambda entry: -entry[1])[:num_top]

    def score(self, token_ids, length_penalty):
        logprob = fsum(self.logprob(token_ids[:i], t) for i, t in enumerate(token_ids))
        return logprob / len(token_ids) ** length_penalty


TABLES = st.builds(
    Table, st.integers(2, 9), st.integers(0, 2**32), st.sampled_from([1, 3, 20, 10**9])
)


@st.composite
def searches(draw):
    """A table and the arguments of a search in it; at least one token is not a stop token."""
    table = draw(TABLES)
    stops = draw(st.sets(st.integers(0, table.vocab_size - 1), max_size=table.vocab_size - 1))
    width = draw(st.integers(1, 5))
    num_returned = draw(st.integers(1, width))
    return table, {
        "params": SamplingParams(n=num_returned, beam_width=width, **draw(SCORING)),
        "stop_token_ids": frozenset(stops),
        "max_tokens": draw(st.integers(1, 8)),
    }


def run(search, table, num_top):
    """Runs a search; returns each step's running beams as tuples of tokens."""
    steps = search.start(table.report((), num_top))
    history = [[(step.token_id,) for step in steps]]
    while not search.is_done:
        before = history[-1]
        steps = search.advance([table.report(beam, num_top) for beam in before])
        history.append([(*before[step.parent], step.token_id) for step in steps])
    return history


@given(searches())
def test_results_are_distinct_ended_scored_and_sorted(drawn):
    table, case = drawn
    search = BeamSearch(**case)
    run(search, table, search.num_top)
    results = search.results()
    assert len({result.token_ids for result in results}) == len(results)
    assert sorted((result.score for result in results), reverse=True) == [r.score for r in results]
    if table.vocab_size >= case["params"].beam_width:
        assert len(results) == case["params"].n
    for result in results:
        *others, last = result.token_ids
        assert case["stop_token_ids"].isdisjoint(others)
        assert result.is_stopped == (last in case["stop_token_ids"])
        assert result.is_stopped or len(result.token_ids) == case["max_tokens"]
        score = table.score(result.token_ids, case["params"].length_penalty)
        assert result.score == pytest.approx(score)


@given(searches())
def test_running_beams_are_distinct_and_unstopped_and_end_within_max_tokens(drawn):
    table, case = drawn
    search = BeamSearch(**case)
    history = run(search, table, search.num_top)
    assert len(history) <= case["max_tokens"]
    assert history[-1] == []
    for num_tokens, beams in enumerate(history[:-1], 1):
        assert 1 <= len(beams) <= case["params"].beam_width
        assert len(set(beams)) == len(beams)
        assert all(len(beam) == num_tokens for beam in beams)
        assert case["stop_token_ids"].isdisjoint(token_id for beam in beams for token_id in beam)


@given(searches())
def test_reports_of_more_tokens_than_needed_change_nothing(drawn):
    table, case = drawn
    top_tokens, all_tokens = BeamSearch(**case), BeamSearch(**case)
    history = run(top_tokens, table, top_tokens.num_top)
    assert history == run(all_tokens, table, table.vocab_size)
    assert top_tokens.results() == all_tokens.results()


def hypotheses(table, stops, max_tokens):
    for length in range(1, max_tokens + 1):
        for *others, last in product(range(table.vocab_size), repeat=length):
            if stops.isdisjoint(others) and (length == max_tokens or last in stops):
                yield (*others, last)


@given(
    st.sampled_from([(2, 1), (2, 2), (2, 3), (2, 4), (2, 6), (3, 1), (3, 2), (3, 3)]),
    st.integers(0, 2**32),
    st.sets(st.integers(0, 1)),
    SCORING,
)
def test_a_search_with_a_beam_per_hypothesis_finds_all_of_them(sizes, seed, stops, scoring):
    vocab_size, max_tokens = sizes
    table = Table(vocab_size, seed, num_values=10**9)
    width = vocab_size**max_tokens
    params = SamplingParams(n=width, beam_width=width, **scoring)
    search = BeamSearch(params, stop_token_ids=frozenset(stops), max_tokens=max_tokens)
    run(search, table, search.num_top)
    found = [result.token_ids for result in search.results()]
    expected = list(hypotheses(table, stops, max_tokens))
    assert found == sorted(expected, key=lambda ids: -table.score(ids, params.length_penalty))


@given(TABLES, st.sets(st.integers(0, 8)), st.integers(1, 8), SCORING)
def test_a_search_of_width_one_is_greedy(table, stops, max_tokens, scoring):
    params = SamplingParams(beam_width=1, **scoring)
    search = BeamSearch(params, stop_token_ids=frozenset(stops), max_tokens=max_tokens)
    run(search, table, search.num_top)
    greedy = ()
    while len(greedy) < max_tokens and stops.isdisjoint(greedy):
        ((token_id, _),) = table.report(greedy, 1)
        greedy = (*greedy, token_id)
    assert [result.token_ids for result in search.results()] == [greedy]
