"""`/v1/responses` through OpenAI's client, over a real router and scripted workers."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from baton.common.errors import AbortedError
from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from tests.support.answer_chunks import check_type
from tests.support.fake_workers import EOS_TOKEN_ID, FakeDecode
from tests.support.running_http import running_http
from tests.support.running_router import script_of, tokenizer

TEXT = "The quick brown fox, naïve café 😀."
MODEL = "scripted"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STORE = frozenset({"store"})


def answering(text):
    return FakeDecode([*script_of(text), EOS_TOKEN_ID])


def running(*workers, **config):
    source = TemplateSource({"default": TemplateText(TEMPLATE, "test")}, {})
    return running_http(*workers, chat_template=ChatTemplate(source), **config)


async def raw_events(api, **body):
    """The events of a stream as they are sent."""
    body = {"input": "Hi", "stream": True} | body
    async with api.http.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = (await answer.aread()).decode()
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without_ids(items):
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


async def test_a_whole_response_and_a_stream_are_the_same():
    decode = answering(TEXT)
    async with running(decode) as api:
        fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u"}
        whole = await api.http.post("/v1/responses", json={"input": "Hi"} | fields)
        events = await raw_events(api, **fields)
    prompt = tokenizer().decode(decode.starts[0].spec.prompt_token_ids, skip_special_tokens=False)
    assert prompt == "[system]Be brief.[user]Hi[assistant]"
    body, last = whole.json(), events[-1]["response"]
    response = check_type(Response, body, STORE)
    assert response.output_text == TEXT
    assert (response.status, response.model, response.user) == ("completed", MODEL, "u")
    assert response.usage.output_tokens == len(script_of(TEXT)) + 1
    assert body["store"] is False
    assert set(body) == set(last)
    assert without_ids(last["output"]) == without_ids(body["output"])
    assert [
        event["type"].removeprefix("response.") for event in events if "delta" not in event
    ] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    for event in events:
        check_type(ResponseStreamEvent, event, STORE)


async def test_the_clients_stream_helper_reads_the_events():
    async with running(answering(TEXT)) as api:
        text = ""
        async with api.openai.responses.stream(model=MODEL, input="Hi") as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    text += event.delta
            final = await stream.get_final_response()
    assert text == final.output_text == TEXT


async def test_reasoning_and_calls_are_items_of_their_own():
    decode = answering(f"<think>\nHm.\n</think>\n\nLet me see. {CALL}")
    config = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    async with running(decode, **config) as api:
        request = {"model": MODEL, "input": "1+1?", "tools": [TOOL]}
        whole = await api.openai.responses.create(**request)
        async with api.openai.responses.stream(**request) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_response()
        items = [item.to_dict() for item in whole.output]
        answered = await api.openai.responses.create(
            model=MODEL,
            tools=[TOOL],
            input=[
                {"role": "user", "content": "1+1?"},
                *items,
                {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "2"},
            ],
        )
    reasoning, message, call = whole.output
    assert reasoning.content[0].text.strip() == "Hm."
    assert message.content[0].text.strip() == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert "response.reasoning_text.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert answered.status == "completed"


async def test_a_custom_tool_is_called_with_a_text_beside_hosted_tools():
    text = 'print("hi")\n'
    call = json.dumps({"name": "exec__python", "arguments": {"input": text}})
    custom = {"type": "custom", "name": "python"}
    namespace = {"type": "namespace", "name": "exec", "description": "Runs.", "tools": [custom]}
    fields = {"model": MODEL, "tools": [namespace, {"type": "web_search"}, TOOL]}
    decode = answering(f"<tool_call>{call}</tool_call>")
    async with running(decode, tool_call_parser="hermes") as api:
        whole = await api.openai.responses.create(**fields, input="Hi")
        events = await raw_events(api, **fields)
        (item,) = [item.to_dict() for item in whole.output]
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "hi"}
        answered = await api.openai.responses.create(**fields, input=[item, output])
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "python", text)
    assert item["namespace"] == "exec"
    assert item["id"].startswith("ctc_")
    deltas = [event["delta"] for event in events if "delta" in event]
    assert "".join(deltas) == text
    assert without_ids(events[-1]["response"]["output"])[0] | {"call_id": item["call_id"]} == {
        name: value for name, value in item.items() if name != "id"
    }
    for event in events:
        check_type(ResponseStreamEvent, event, STORE)
    assert answered.status == "completed"
    prompt = tokenizer().decode(decode.starts[-1].spec.prompt_token_ids)
    assert "[tool]hi" in prompt


async def test_a_forced_call_needs_no_parser():
    async with running(answering('{"a": 1}')) as api:
        response = await api.openai.responses.create(
            model=MODEL,
            input="Hi",
            tools=[TOOL],
            tool_choice={"type": "function", "name": "add"},
        )
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})


class Point(BaseModel):
    x: int


async def test_the_clients_parse_helper_returns_the_parsed_object():
    decode = answering('{"x": 3}')
    async with running(decode) as api:
        response = await api.openai.responses.parse(model=MODEL, input="Hi", text_format=Point)
    assert response.output_parsed == Point(x=3)
    assert decode.starts[0].spec.sampling.structured_outputs.json


async def test_a_limit_makes_a_response_incomplete():
    async with running(FakeDecode(script_of(TEXT))) as api:
        whole = await api.openai.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
        events = await raw_events(api, max_output_tokens=3)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[0].status == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


async def test_logprobs_of_the_text():
    fields = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    async with running(answering("abc 😀")) as api:
        whole = await api.openai.responses.create(model=MODEL, input="Hi", **fields)
        events = await raw_events(api, **fields)
        without = await api.openai.responses.create(model=MODEL, input="Hi")
    entries = whole.output[0].content[0].logprobs
    *text, end = entries
    assert bytes(byte for entry in text for byte in entry.bytes).decode() == "abc 😀"
    assert end.token == "</s>"
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
    streamed = [
        entry["token"]
        for event in events
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert streamed == [entry.token for entry in entries]
    assert without.output[0].content[0].logprobs == []


async def test_an_error_within_a_stream_is_a_failed_response():
    decode = FakeDecode(script_of(TEXT), pause_after=2)
    async with running(decode) as api:
        stream = await api.openai.responses.create(model=MODEL, input="Hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                decode.fail_running(AbortedError("stopped"))
            last = event
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.code == "server_error"
    assert last.response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_serch"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_p": 7.0}, "top_p"),
        ({"include": ["everything"]}, "include"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_field_is_named(fields, param, stream):
    async with running(answering("a")) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await api.openai.responses.create(
                model=MODEL, input="Hi", stream=stream, extra_body=fields
            )
    assert caught.value.param.startswith(param)


async def test_the_tokens_of_an_input_are_counted():
    decode = answering("a")
    async with running(decode) as api:
        fields = {"model": MODEL, "input": "Hi", "instructions": "Be brief."}
        counted = await api.openai.responses.input_tokens.count(**fields)
        response = await api.openai.responses.create(**fields)
        alone = await api.openai.responses.input_tokens.count(instructions="Be brief.")
        for wrong in ({}, {"previous_response_id": "r"}, {"input": "Hi", "personality": "x"}):
            with pytest.raises(openai.BadRequestError):
                await api.openai.responses.input_tokens.count(**wrong)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == response.usage.input_tokens
    assert alone.input_tokens == len(script_of("[system]Be brief.[assistant]"))


@pytest.mark.parametrize("text", [CALL, '{"x": 1}'])
async def test_a_response_with_tools_and_a_form_is_a_call_or_has_the_form(text):
    form = {"type": "json_schema", "name": "point", "schema": Point.model_json_schema()}
    decode = answering(text)
    async with running(decode, tool_call_parser="hermes") as api:
        response = await api.openai.responses.create(
            model=MODEL, input="Hi", tools=[TOOL], text={"format": form}
        )
    assert decode.starts[0].spec.sampling.structured_outputs.structural_tag
    (item,) = response.output
    assert item.type == ("function_call" if text == CALL else "message")


async def test_a_forced_call_outweighs_a_form():
    decode = answering('{"a": 1}')
    async with running(decode) as api:
        response = await api.openai.responses.create(
            model=MODEL,
            input="Hi",
            tools=[TOOL],
            tool_choice={"type": "function", "name": "add"},
            text={"format": {"type": "json_object"}},
        )
    assert response.output[0].type == "function_call"
    assert decode.starts[0].spec.sampling.structured_outputs.json
