"""`Completion`: the responses that a client receives for outputs of candidates."""

import pytest

from baton.common.request.answer import CandidateOutput
from baton.common.request.request_spec import RequestSpec
from baton.common.request.results import Timings
from baton.common.request.sampling_params import SamplingParams
from baton.v1 import common_pb2
from router.observe.request_record import RequestRecord
from router.requests import text_stream
from router.stages.completion import Completion
from tests.support.running_router import script_of, tokenizer

STOP, LENGTH, ABORTED = "stop", "length", "abort"


def make_completion(**params):
    spec = RequestSpec(
        request_id="r/0123456789abcdef",
        prompt_token_ids=(5, 6),
        params=SamplingParams(**params),
        stop_token_ids=frozenset({7, 8}),
    )
    return Completion(spec, tokenizer(), RequestRecord(arrived_at=0.0))


def make_output(token_ids, finish_reason=None, **fields):
    return CandidateOutput(token_ids=token_ids, finish_reason=finish_reason, **fields)


async def test_tokens_after_a_stop_string_are_dropped():
    token_ids = script_of("a.b.c")
    (response,) = make_completion(stop=["b"]).add(make_output(token_ids, LENGTH, is_last=True))
    assert list(response.token_ids) == token_ids[:3]
    assert response.text == "a."
    assert response.finish_reason == STOP
    assert response.matched_stop == "b"
    assert response.usage.completion_tokens == 3


async def test_text_held_back_for_a_stop_string_is_sent_at_the_end():
    part = make_completion(stop=["b!"])
    (first,) = part.add(make_output(script_of("ab")))
    (last,) = part.add(make_output([], LENGTH, is_last=True))
    assert (first.text, last.text) == ("a", "b")
    assert last.finish_reason == LENGTH
    assert last.matched_stop is None


async def test_stop_strings_are_prepared_once_for_all_candidates(monkeypatch):
    prepared = []
    prepare = text_stream._build_automaton
    monkeypatch.setattr(
        text_stream, "_build_automaton", lambda stops: prepared.append(stops) or prepare(stops)
    )
    part = make_completion(n=3, stop=["b!"])
    texts = [
        part.add(make_output(script_of(text), index=i))[0].text for i, text in enumerate("abc")
    ]
    assert texts == ["a", "", "c"]
    assert prepared == [("b!",)]


async def test_an_incomplete_character_is_held_back():
    token_ids = [token_id for byte in "€".encode() for token_id in byte_token(byte)]
    part = make_completion()
    texts = [part.add(make_output([token_id]))[0].text for token_id in token_ids]
    assert texts == ["", "", "€"]


def byte_token(byte):
    """Returns the token of one byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [other for other in range(256) if other not in printable]
    symbol = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return [tokenizer()._backend.token_to_id(symbol)]


@pytest.mark.parametrize(("reason", "matched"), [(STOP, 7), (LENGTH, None)])
async def test_the_stop_token_is_reported_if_one_ended_the_candidate(reason, matched):
    (response,) = make_completion().add(make_output([9, 7], reason, is_last=True))
    assert response.matched_stop == matched
    assert response.finish_reason == reason


@pytest.mark.parametrize("include", [False, True])
async def test_a_complete_structured_output_ends_with_its_last_token(include):
    """The engine ends a text that its grammar does not let go on, without a stop token."""
    part = make_completion(include_stop_str_in_output=include, stop=["}!"])
    token_ids = script_of('{"a":"yes"}')
    (first,) = part.add(make_output(token_ids[:2]))
    (last,) = part.add(make_output(token_ids[2:], STOP, is_last=True))
    assert len(token_ids[2:]) > 1  # forced tokens arrive together
    assert list(last.token_ids) == token_ids[2:]
    assert first.text + last.text == '{"a":"yes"}'
    assert last.finish_reason == STOP
    assert last.matched_stop is None


async def test_a_complete_structured_output_may_end_after_its_last_token():
    part = make_completion()
    (first,) = part.add(make_output(script_of("yes")))
    (end,) = part.add(make_output([], STOP, is_last=True))
    assert (first.text, end.text, end.finish_reason) == ("yes", "", STOP)
    assert end.matched_stop is None


async def test_forced_tokens_end_at_a_stop_text_among_them():
    part = make_completion(stop=["b"])
    token_ids = script_of("a.b.c")
    (response,) = part.add(make_output(token_ids, STOP, is_last=True))
    assert (response.text, response.matched_stop) == ("a.", "b")
    assert list(response.token_ids) == token_ids[:3]


async def test_a_stop_token_may_precede_the_end():
    """Prefill may draw the stop token of one candidate while decode continues the others."""
    part = make_completion(n=2)
    part.add(make_output([7]))
    (end,) = part.add(make_output([], STOP))
    assert end.matched_stop == 7
    assert end.usage is None


async def test_timings_and_cached_tokens_come_from_the_first_output_that_has_them():
    part = make_completion()
    prompt = Timings(queue_ms=1, prefill_ms=2)
    part.add(make_output([9], cached_tokens=4, stages=prompt))
    saved = Timings(queue_ms=1, prefill_ms=2, transfer_ms=3)
    assert part.add(CandidateOutput(stages=saved)) == []
    handed_over = Timings(queue_ms=50, prefill_ms=60, load_ms=5)
    part.add(make_output([9], cached_tokens=8, stages=handed_over))
    resumed = Timings(load_ms=500)
    (last,) = part.add(make_output([9], LENGTH, stages=resumed, is_last=True))
    assert last.usage.cached_tokens == 4
    assert last.usage.prompt_tokens == 2
    timings = last.timings
    assert (timings.queue_ms, timings.prefill_ms, timings.transfer_ms) == (1, 2, 3)
    assert timings.load_ms == 5


async def test_the_last_candidates_output_ends_the_request_with_usage_of_all():
    part = make_completion(n=3)
    first_end, *_ = part.add(make_output([9, 8], STOP, index=1))
    assert (first_end.index, first_end.matched_stop) == (1, 8)
    assert first_end.usage is None
    part.add(make_output([9], index=0))
    part.add(make_output([4], LENGTH, index=0))
    assert not part.is_over
    (last,) = part.add(make_output([9, 9, 9], LENGTH, index=2, is_last=True))
    assert part.is_over
    assert last.usage.completion_tokens == 7


async def test_late_tokens_of_an_ended_candidate_are_dropped():
    part = make_completion(n=2, stop=["b"])
    (stopped,) = part.add(make_output(script_of("ab")))
    assert stopped.matched_stop == "b"
    assert part.add(make_output(script_of("cd"))) == []
    (last,) = part.add(make_output([9], LENGTH, index=1))
    assert last.usage.completion_tokens == len(script_of("ab")) + 1


async def test_candidates_that_have_not_ended_end_with_the_request():
    part = make_completion(n=3)
    part.add(make_output([9], LENGTH, index=1))
    held = part.add(make_output([], ABORTED, is_last=True))
    assert [(response.index, response.finish_reason) for response in held] == [
        (0, ABORTED),
        (2, ABORTED),
    ]
    assert [response.usage is not None for response in held] == [False, True]
    # The request's last output may be of a candidate that has ended: the others end all the same.
    part = make_completion(n=2)
    part.add(make_output([9], LENGTH, index=0))
    (rest,) = part.add(make_output([], ABORTED, index=0, is_last=True))
    assert (rest.index, rest.finish_reason) == (1, ABORTED)


async def test_only_ranked_candidates_have_a_score():
    part = make_completion(n=1, best_of=2)
    assert part.add(make_output([], stages=Timings(prefill_ms=2))) == []
    (best,) = part.add(make_output([9], LENGTH, score=-0.5, is_last=True))
    assert best.score == -0.5
    assert best.timings.prefill_ms == 2
    assert best.timings.first_token_ms == pytest.approx(best.timings.total_ms, rel=0.01)
    (plain,) = make_completion().add(make_output([9], LENGTH, is_last=True))
    assert plain.score is None


async def test_log_probabilities_after_a_stop_string_are_dropped_with_their_tokens():
    token_ids = script_of("a.b.c")
    details = [common_pb2.TokenLogprobs(logprob=-number) for number in range(5)]
    part = make_completion(stop=["b"], logprobs=0)
    (response,) = part.add(make_output(token_ids, LENGTH, logprobs=details, is_last=True))
    assert list(response.logprobs) == details[:3]


async def test_a_prompt_computed_twice_is_reported_once_and_whole():
    """The first replica was lost before it sent a token."""
    details = [common_pb2.TokenLogprobs(logprob=-1), common_pb2.TokenLogprobs(logprob=-2)]
    part = make_completion(prompt_logprobs=0)
    assert part.add(make_output([], prompt_logprobs=details[:1])) == []
    (first,) = part.add(make_output([9], prompt_logprobs=details[1:]))
    (second,) = part.add(make_output([9], LENGTH, prompt_logprobs=details, is_last=True))
    assert (list(first.prompt_logprobs), list(first.prompt_token_ids)) == (details[1:], [5, 6])
    assert not second.prompt_logprobs
    assert not second.prompt_token_ids
