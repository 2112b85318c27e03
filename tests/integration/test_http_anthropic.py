"""`/v1/messages` through Anthropic's client, over a real router and scripted workers."""

import json
from contextlib import asynccontextmanager

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel

from baton.common.errors import AbortedError
from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from tests.support.answer_chunks import check_type
from tests.support.answering_decode import AnsweringDecode
from tests.support.fake_workers import EOS_TOKEN_ID, FakeDecode, FakePrefill
from tests.support.running_http import running_http
from tests.support.running_router import script_of, tokenizer

TEXT = "The quick brown fox, naïve café 😀."
MODEL = "scripted"
USER = {"role": "user", "content": "Hi"}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
REQUEST = {"model": MODEL, "max_tokens": 200, "messages": [USER]}


def answering(text):
    return FakeDecode([*script_of(text), EOS_TOKEN_ID])


@asynccontextmanager
async def running(*workers, **config):
    """The HTTP server, and Anthropic's client of it as `anthropic`."""
    source = TemplateSource({"default": TemplateText(TEMPLATE, "test")}, {})
    async with (
        running_http(*workers, chat_template=ChatTemplate(source), **config) as api,
        anthropic.AsyncAnthropic(base_url=api.url, api_key="none", max_retries=0) as client,
    ):
        api.anthropic = client
        yield api


def prompt_text(decode):
    return tokenizer().decode(decode.starts[-1].spec.prompt_token_ids, skip_special_tokens=False)


async def raw_events(api, **body):
    """The events of a stream as they are sent."""
    body = REQUEST | {"stream": True} | body
    async with api.http.stream("POST", "/v1/messages", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        text = (await answer.aread()).decode()
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_whole_message_and_a_stream_are_the_same():
    decode = answering(TEXT)
    async with running(decode) as api:
        whole = (await api.http.post("/v1/messages", json=REQUEST | {"system": "Rhyme."})).json()
        events = await raw_events(api, system="Rhyme.")
        async with api.anthropic.messages.stream(**REQUEST, system="Rhyme.") as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
    assert prompt_text(decode) == "[system]Rhyme.[user]Hi[assistant]"
    message = check_type(Message, whole)
    assert message.content[0].text == text == TEXT
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, MODEL)
    usage = message.usage
    num_prompt_tokens = len(decode.starts[0].spec.prompt_token_ids)
    assert usage.input_tokens + usage.cache_read_input_tokens == num_prompt_tokens
    assert usage.output_tokens == len(script_of(TEXT)) + 1
    expected = message.to_dict(exclude_none=True) | {"id": final.id}
    assert final.to_dict(exclude_none=True) == expected
    for event in events:
        if event["type"] != "ping":
            check_type(RawMessageStreamEvent, event)


async def test_a_stream_begins_with_the_counts_of_the_prompt():
    prefill, decode = FakePrefill(script_of("abc")), answering("abc")
    long = {"role": "user", "content": "word " * 40}
    async with running(prefill, decode) as api:
        for message in (long, USER):  # with a remote prefill, and with a local one
            first, *_, last, _ = await raw_events(api, messages=[message], max_tokens=3)
            usage = check_type(RawMessageStreamEvent, first).message.usage
            num_prompt_tokens = len(decode.starts[-1].spec.prompt_token_ids)
            assert usage.input_tokens + usage.cache_read_input_tokens == num_prompt_tokens
            assert usage.cache_read_input_tokens > 0
            assert last["usage"]["input_tokens"] == usage.input_tokens > 0
            assert usage.output_tokens == 0


async def test_the_models_are_listed_for_anthropics_client():
    async with running(answering("a"), served_model_name=("scripted", "other")) as api:
        listed = [model async for model in api.anthropic.models.list()]
        named = await api.anthropic.models.retrieve("other")
        openais = await api.openai.models.list()
    assert [model.id for model in listed] == ["scripted", "other"]
    assert named == listed[1]
    assert (named.type, named.display_name) == ("model", "other")
    assert named.created_at.timestamp() == openais.data[1].created
    assert [(model.id, model.object) for model in openais.data] == [
        ("scripted", "model"),
        ("other", "model"),
    ]


async def test_thinking_and_calls_are_blocks_of_their_own():
    decode = answering(f"<think>\nHm.\n</think>\n\nLet me see. {CALL}")
    config = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    async with running(decode, **config) as api:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        request = REQUEST | {"tools": [TOOL], "thinking": thinking}
        whole = await api.anthropic.messages.create(**request)
        async with api.anthropic.messages.stream(**request) as stream:
            final = await stream.get_final_message()
        result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "2"}
        turn = {"role": "assistant", "content": whole.content}
        answered = await api.anthropic.messages.create(
            **request | {"messages": [USER, turn, {"role": "user", "content": [result]}]}
        )
    thought, text, call = whole.content
    assert thought.thinking.strip() == "Hm."
    assert thought.signature == ""
    assert text.text.strip() == "Let me see."
    assert (call.name, call.input) == ("add", {"a": 1})
    assert whole.stop_reason == final.stop_reason == "tool_use"
    for mine, theirs in zip(final.content, whole.content, strict=True):
        ids = {"id": ""}
        assert mine.to_dict() | ids == theirs.to_dict() | ids
    assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens
    assert "[True]" in prompt_text(decode)
    assert decode.starts[0].spec.sampling.thinking_token_budget == 1024
    assert answered.role == "assistant"
    assert decode.starts[0].spec.sampling.thinking_token_budget == 1024


async def test_a_forced_call_needs_no_parser():
    async with running(answering('{"a": 1}')) as api:
        message = await api.anthropic.messages.create(
            **REQUEST, tools=[TOOL], tool_choice={"type": "tool", "name": "add"}
        )
    (call,) = message.content
    assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1})
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_tool_runner_sends_the_whole_conversation(stream):
    """It sends new messages alone to servers that keep conversations."""

    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Adds one."""
        return f"sum {a + 1}"

    decode = AnsweringDecode(lambda prompt, spec: "Done." if "[tool]sum 2" in prompt else CALL)
    async with running(decode, tool_call_parser="hermes") as api:
        runner = api.anthropic.beta.messages.tool_runner(**REQUEST, tools=[add], stream=stream)
        replies = [await turn.get_final_message() if stream else turn async for turn in runner]
    assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"]
    assert replies[1].content[0].text == "Done."
    assert decode.prompts[-1].startswith("[user]Hi[assistant]")
    assert decode.prompts[-1].endswith("[tool]sum 2[assistant]")
    assert len(decode.prompts) == 2


async def test_the_stop_reason_of_a_message():
    async with running(answering("abc quick brown")) as api:
        stopped = await api.anthropic.messages.create(**REQUEST, stop_sequences=["ck br"])
        cut = await api.anthropic.messages.create(**REQUEST | {"max_tokens": 2})
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ck br")
    assert stopped.content[0].text == "abc qui"
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


async def test_a_prefill_is_continued():
    decode = answering("def")
    async with running(decode) as api:
        prefill = {"role": "assistant", "content": "abc"}
        message = await api.anthropic.messages.create(**REQUEST | {"messages": [USER, prefill]})
    assert prompt_text(decode) == "[user]Hi[assistant]abc"
    assert message.content[0].text == "def"


class Point(BaseModel):
    x: int


async def test_the_clients_parse_helper_returns_the_parsed_object():
    decode = answering('{"x": 3}')
    async with running(decode) as api:
        message = await api.anthropic.messages.parse(**REQUEST, output_format=Point)
    assert message.parsed_output == Point(x=3)
    assert decode.starts[0].spec.sampling.structured_outputs.json


async def test_tokens_are_counted_as_a_message_counts_them():
    async with running(answering("a")) as api:
        counted = await api.anthropic.messages.count_tokens(
            model=MODEL, messages=[USER], system="Rhyme."
        )
        message = await api.anthropic.messages.create(**REQUEST, system="Rhyme.")
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


async def test_errors_have_anthropics_shape():
    async with running(answering("a")) as api:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await api.anthropic.messages.create(**REQUEST, extra_body={"top_p": 7.0})
        with pytest.raises(anthropic.NotFoundError) as missing:
            await api.anthropic.messages.create(**REQUEST | {"model": "other"})
        malformed = await api.http.post("/v1/messages", json={"messages": "Hi"})
    error = check_type(ErrorResponse, caught.value.body)
    assert error.error.type == "invalid_request_error"
    assert "top_p is 7.0" in error.error.message
    assert error.request_id
    assert error.request_id == caught.value.request_id
    assert check_type(ErrorResponse, missing.value.body).error.type == "not_found_error"
    assert malformed.status_code == 400
    assert "messages" in check_type(ErrorResponse, malformed.json()).error.message


async def test_an_error_within_a_stream_is_an_event():
    decode = FakeDecode(script_of(TEXT), pause_after=2)
    async with running(decode) as api:

        async def read() -> None:
            async with api.anthropic.messages.stream(**REQUEST) as stream:
                async for event in stream:
                    if event.type == "text":
                        decode.fail_running(AbortedError("stopped"))

        with pytest.raises(anthropic.APIStatusError) as caught:
            await read()
    assert check_type(ErrorResponse, caught.value.body).error.type == "overloaded_error"


@pytest.mark.parametrize(
    ("choice", "text", "kind"),
    [
        ("auto", CALL, "tool_use"),
        ("auto", '{"x": 1}', "text"),
        ("any", '[{"name": "add", "parameters": {"a": 1}}]', "tool_use"),
    ],
)
async def test_a_message_with_tools_and_a_form_is_a_call_or_has_the_form(choice, text, kind):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    async with running(answering(text), tool_call_parser="hermes") as api:
        message = await api.anthropic.messages.create(
            **REQUEST,
            tools=[TOOL],
            tool_choice={"type": choice},
            extra_body={"output_config": {"format": form}},
        )
    assert [block.type for block in message.content] == [kind]
