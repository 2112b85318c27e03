"""Look-ups of draft tokens, compared with plain searches."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.groups.states import SEPARATOR, TokenHistory
from engine.speculation.lookup import AnswerLookup, SequenceLookup, make_proposer
from engine.speculative_config import SpeculativeConfig

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def _longest_latest(tokens: list[int], least: int, most: int) -> int | None:
    """Returns the index after the latest of the longest earlier occurrences of the last tokens."""
    for width in range(min(most, len(tokens) - 1), least - 1, -1):
        for end in range(len(tokens) - 1, width - 1, -1):
            if tokens[end - width : end] == tokens[-width:]:
                return end
    return None


@settings(max_examples=200, deadline=None)
@given(tokens=TOKENS, least=st.integers(1, 4), span=st.integers(0, 4), limit=st.integers(1, 9))
def test_a_sequence_is_searched_for_its_last_tokens(
    tokens: list[int], least: int, span: int, limit: int
) -> None:
    config = SpeculativeConfig(
        method="ngram", prompt_lookup_min=least, prompt_lookup_max=least + span
    )
    start = _longest_latest(tokens, least, least + span)
    # A text that repeats itself at its end goes on so.
    expected = [] if start is None else (tokens[start:] * limit)[:limit]

    found = SequenceLookup(config).propose(np.array(tokens, np.int32), limit, is_private=False)

    assert found == expected


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=300), max_size=25),
    data=st.data(),
)
def test_earlier_answers_are_searched_as_long_as_they_are_kept(
    answers: list[list[int]], data: st.DataObject
) -> None:
    config = SpeculativeConfig(method="suffix", max_cached_tokens=1024)
    lookup = AnswerLookup(config)
    for answer in answers:
        lookup.keep_answer([99, *answer], 1)
    assert len(lookup._latest) <= 1024

    asked = data.draw(st.lists(st.integers(0, 20), min_size=3, max_size=6, unique=True))
    found = lookup.propose(np.array(asked, np.int32), 8, is_private=False)

    if found:  # an answer, or the prompt's end and the answer, that continues in this way
        texts = [[99, *answer] for answer in answers]
        parts = [text[i : i + 3 + len(found)] for text in texts for i in range(len(text))]
        assert [*asked[-3:], *found] in parts
    if answers and len(answers[-1]) > 3:
        last = answers[-1]
        newest = np.array([50, *last[:3]], np.int32)
        assert lookup.propose(newest, 1, is_private=False)
        assert not lookup.propose(newest[-3:], 1, is_private=True) or len(set(last[:3])) < 3

        lookup.forget_answers()
        assert not lookup.propose(newest, 1, is_private=False) or len(set(last[:3])) < 3
        lookup.keep_answer([99, *last], 1)
        assert lookup.propose(newest, 1, is_private=False)


@settings(max_examples=300, deadline=None)
@given(
    prediction=TOKENS,
    tokens=TOKENS,
    method=st.sampled_from(["ngram", "suffix"]),
    least=st.integers(1, 4),
    limit=st.integers(1, 9),
)
def test_draft_tokens_from_a_prediction_continue_it(
    prediction: list[int], tokens: list[int], method: str, least: int, limit: int
) -> None:
    """The longest of the last tokens that occur count; in the sequence rather than before it."""
    config = SpeculativeConfig(method=method, prompt_lookup_min=least, prompt_lookup_max=8)
    searched = TokenHistory(prediction).updated(tokens)
    assert searched.tolist() == [*prediction, SEPARATOR, *tokens]

    found = make_proposer(config).propose(searched, limit, is_private=False)

    own, width = _longest_latest(tokens, least, 8), 0
    while own is not None and width < 8 and tokens[:own][-width - 1 :] == tokens[-width - 1 :]:
        width += 1
    expected = [] if own is None else (tokens[own:] * limit)[:limit]
    for wider in range(min(8, len(tokens)), max(width, least - 1), -1):
        ends = range(len(prediction) - 1, wider - 1, -1)
        starts = [end for end in ends if prediction[end - wider : end] == tokens[-wider:]]
        if starts:
            expected = prediction[starts[0] :][:limit]
            break
    assert found == expected


@given(prediction=TOKENS, tokens=TOKENS, data=st.data())
def test_a_prediction_goes_on_while_the_answer_is_its_beginning(
    prediction: list[int], tokens: list[int], data: st.DataObject
) -> None:
    answer = data.draw(st.just(prediction[: data.draw(st.integers(0, 40))]) | TOKENS)
    history = TokenHistory(prediction)
    history.updated(tokens)
    history.updated([*tokens, *answer])

    found = history.predicted(len(tokens), 4)

    is_beginning = prediction[: len(answer)] == answer
    assert found == (prediction[len(answer) :][:4] if is_beginning else [])
    assert TokenHistory().predicted(0, 4) == []


@given(parts=st.lists(TOKENS, min_size=1, max_size=6))
def test_a_history_grows_with_its_sequence(parts: list[list[int]]) -> None:
    history, tokens = TokenHistory(), list[int]()
    for part in parts:
        tokens += part * 20
        assert history.updated(tokens).tolist() == tokens
