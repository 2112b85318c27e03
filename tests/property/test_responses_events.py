"""Events of the Responses API add up to the whole answer, for any answer, as the official client
adds them up."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai._models import construct_type
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from router.http.responses_answer import ResponseAnswer, ResponseStream
from router.http.responses_request import ResponsesBody, read_responses_request
from tests.support.answer_chunks import answers, check_type


def request_of(*tools):
    body = {"model": "m", "input": "Hi", "tools": list(tools)}
    return read_responses_request(ResponsesBody.model_validate(body))


CUSTOM = {"type": "custom", "name": "f"}
REQUESTS = st.sampled_from([request_of(), request_of(CUSTOM)])
STORE = frozenset({"store"})  # the API sends it, the client's type lacks it


def new_answer(request):
    numbers = itertools.count()
    return ResponseAnswer(
        request, "m", new_id=lambda prefix: f"{prefix}_{next(numbers)}", now=lambda: 5.0
    )


def streamed(chunks, request):
    stream = ResponseStream(new_answer(request))
    return [event for each in chunks for event in stream.push(each)] + stream.finish()


def whole(chunks, request):
    answer = new_answer(request)
    for each in chunks:
        answer.push(each)
    answer.finish()
    return answer.body()


def added_up(events):
    """The output items, made of the events' deltas alone."""
    items = {}
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items[event["output_index"]] = {**event["item"], "content": []}
            case "content_part.added":
                content = items[event["output_index"]]["content"]
                assert event["content_index"] == len(content)
                content.append(dict(event["part"]))
            case "output_text.delta" | "reasoning_text.delta":
                content = items[event["output_index"]]["content"]
                content[event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                items[event["output_index"]]["input"] += event["delta"]
    for item in items.values():
        if item["type"] in ("function_call", "custom_tool_call"):
            del item["content"]
    return [items[index] | {"status": None} for index in sorted(items)]


@settings(deadline=None, max_examples=50)
@given(answers(), REQUESTS)
def test_deltas_add_up_to_the_whole_answer(chunks, request):
    events = streamed(chunks, request)
    body = whole(chunks, request)
    assert events[-1]["response"] == body
    assert added_up(events) == [item | {"status": None} for item in body["output"]]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == body["output"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@settings(deadline=None, max_examples=50)
@given(answers(), REQUESTS)
def test_each_event_is_one_of_the_clients_types(chunks, request):
    events = streamed(chunks, request)
    for event in events:
        parsed = check_type(ResponseStreamEvent, event, STORE)
        assert parsed.type == event["type"]
    check_type(Response, events[-1]["response"], STORE)


@settings(deadline=None, max_examples=50)
@given(answers(), REQUESTS)
def test_the_client_adds_up_the_same_answer(chunks, request):
    state = ResponseStreamState(input_tools=[], text_format=omit)
    for event in streamed(chunks, request):
        state.handle_event(construct_type(type_=ResponseStreamEvent, value=event))
    body = whole(chunks, request)
    for index, item in enumerate(body["output"]):
        mine = state._output_items[index]
        if item["type"] == "message":
            assert mine.content[0].text == item["content"][0]["text"]
        elif item["type"] == "function_call":
            assert mine.arguments == item["arguments"]
    if body["status"] == "completed":
        final = state._completed_response.to_dict()
        assert final["usage"] == body["usage"]
        assert [item["id"] for item in final["output"]] == [item["id"] for item in body["output"]]
