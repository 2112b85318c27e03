"""Answers of the Responses API and of Anthropic's API, made of known chunks."""

import pytest

from baton.common.errors import AbortedError
from baton.common.request.answer import ToolCallDelta
from router.http.answer_parts import AnswerParts, PartKind
from router.http.anthropic import MessageAnswer, MessageStream
from router.http.errors import Problem
from router.http.responses_answer import ResponseAnswer, ResponseStream
from router.http.responses_request import ResponsesBody, read_responses_request
from tests.support.answer_chunks import chunk, end_chunk

BODY = {"input": "Hi", "include": ["message.output_text.logprobs"]}
REQUEST = read_responses_request(ResponsesBody.model_validate(BODY))


def response(*chunks, logprobs_of=None):
    answer = ResponseAnswer(REQUEST, "m", logprobs_of, new_id=lambda p: p, now=lambda: 5.0)
    for each in chunks:
        answer.push(each)
    answer.finish()
    return answer.body()


def message(*chunks):
    answer = MessageAnswer("m")
    for each in chunks:
        answer.push(each)
    answer.finish()
    return answer.body()


def first_call(arguments="", index=0):
    return ToolCallDelta(index, f"call_{index}", "add", arguments)


def test_text_after_a_call_may_come_with_the_end_of_its_arguments():
    parts = AnswerParts()
    parts.push(chunk(calls=[first_call('{"a"')]))
    rest = [ToolCallDelta(0, arguments=":1}"), first_call("{}", 1)]
    parts.push(chunk(content="And:", calls=rest))
    kinds = [part.kind for part in parts.parts]
    assert kinds == [PartKind.TOOL_CALL, PartKind.TEXT, PartKind.TOOL_CALL]
    assert [part.text for part in parts.parts] == ['{"a":1}', "And:", "{}"]


def test_an_empty_answer_has_no_parts():
    assert response(end_chunk())["output"] == []
    assert message(end_chunk())["content"] == []


def test_a_response_has_token_counts():
    assert response(chunk("a"), end_chunk())["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 29,
    }


def test_a_message_counts_cached_tokens_apart():
    assert message(chunk("a"), end_chunk())["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 4},
    }


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"finish_reason": "stop"}, "completed", None),
        ({"finish_reason": "length"}, "incomplete", {"reason": "max_output_tokens"}),
        ({"finish_reason": "abort"}, "failed", None),
    ],
)
def test_the_finish_reason_becomes_the_status_of_a_response(fields, status, reason):
    body = response(chunk("a", reasoning="r"), end_chunk(**fields))
    assert (body["status"], body["incomplete_details"]) == (status, reason)
    last = "completed" if status == "completed" else "incomplete"
    assert [item["status"] for item in body["output"]] == ["completed", last]
    assert (body["completed_at"] == 5) == (status == "completed")
    assert (body["error"] is not None) == (status == "failed")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"finish_reason": "stop"}, ("end_turn", None)),
        ({"finish_reason": "stop", "matched_stop": 7}, ("end_turn", None)),
        ({"finish_reason": "stop", "matched_stop": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "length"}, ("max_tokens", None)),
    ],
)
def test_the_finish_reason_becomes_the_stop_reason_of_a_message(fields, expected):
    body = message(chunk("a"), end_chunk(**fields))
    assert (body["stop_reason"], body["stop_sequence"]) == expected


def test_a_message_with_a_call_waits_for_its_result():
    body = message(chunk(calls=[first_call("{}")]), end_chunk("tool_calls"))
    assert body["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("reason", "status", "stop_reason"),
    [
        ("tool_calls", "completed", "tool_use"),
        ("stop", "incomplete", "stop_sequence"),
        ("length", "incomplete", "max_tokens"),
    ],
)
def test_a_call_is_complete_if_nothing_cut_it(reason, status, stop_reason):
    chunks = [chunk(calls=[first_call('{"a"')]), end_chunk(reason, matched_stop="END")]
    (item,) = response(*chunks)["output"]
    assert item["status"] == status
    assert message(*chunks)["stop_reason"] == stop_reason


def test_an_aborted_message_is_an_error():
    with pytest.raises(AbortedError):
        message(chunk("a"), end_chunk("abort"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"a": [1, 2]}', {"a": [1, 2]}),
        ('{"a": 1, "b": "cu', {"a": 1}),
        ("[1]", {}),
        ("no JSON", {}),
    ],
)
def test_arguments_become_the_input_of_a_call(arguments, expected):
    body = message(chunk(calls=[first_call(arguments)]), end_chunk())
    assert body["content"][0]["input"] == expected


def entry(token):
    top = [{"token": token, "logprob": -1.0, "bytes": list(token.encode())}]
    return top[0] | {"top_logprobs": top}


def logprobs_of(each):
    return [entry(str(token_id)) for token_id in each.token_ids]


def test_logprobs_wait_for_the_text_of_their_tokens():
    chunks = [
        chunk(reasoning="r", token_ids=[1]),
        chunk(token_ids=[2]),  # its text is held back
        chunk("ab", token_ids=[3]),
        chunk("c", calls=[first_call()], token_ids=[4]),
        end_chunk(token_ids=[5]),
    ]
    content = response(*chunks, logprobs_of=logprobs_of)["output"][1]["content"][0]
    assert content["logprobs"] == [entry("2"), entry("3"), entry("4")]


def test_logprobs_of_the_end_do_not_depend_on_its_chunk():
    apart = response(chunk("a", token_ids=[1]), end_chunk(token_ids=[2]), logprobs_of=logprobs_of)
    together = response(chunk("a", finish_reason="stop", token_ids=[1, 2]), logprobs_of=logprobs_of)
    assert apart["output"] == together["output"]
    assert apart["output"][0]["content"][0]["logprobs"] == [entry("1"), entry("2")]


def test_a_stream_that_fails_before_its_first_chunk_has_a_failed_response():
    problem = Problem(status=429, message="full", request_id="id")
    stream = ResponseStream(ResponseAnswer(REQUEST, "m"))
    kinds = [event["type"] for event in stream.fail(problem)]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
    (event,) = MessageStream(MessageAnswer("m")).fail(problem)
    assert event == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "full"},
        "request_id": "id",
    }
