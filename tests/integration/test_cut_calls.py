"""Calls that a limit or a stop text cuts, and calls with arguments that are repaired: the same in
every chat protocol, whole and streamed.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from tests.support.fake_workers import EOS_TOKEN_ID, FakeDecode
from tests.support.running_http import running_http
from tests.support.running_router import script_of

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def running(text, **config):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source = TemplateSource({"default": TemplateText(template, "test")}, {})
    decode = FakeDecode([*script_of(text), EOS_TOKEN_ID])
    return running_http(decode, chat_template=ChatTemplate(source), **config)


@dataclass(frozen=True)
class Answer:
    """The content of an answer, its calls with the text of their arguments, and why it ended."""

    content: str
    calls: tuple[tuple[str, str], ...]
    end: str


async def events_of(api, path, body):
    answer = await api.http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "data: " in line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def whole(api, path, body):
    answer = await api.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Chats:
    """OpenAI's chats."""

    path = "/v1/chat/completions"
    limit, stop = "max_tokens", "stop"
    ends: ClassVar = {"length": "length", "stop": "stop", "calls": "tool_calls"}
    forced = "required"
    named: ClassVar = {"type": "function", "function": {"name": "add"}}

    def body(self, **fields):
        tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
        return {"messages": MESSAGES, "tools": [tool], **fields}

    def whole(self, answer):
        (choice,) = answer["choices"]
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = tuple((function["name"], function["arguments"]) for function in functions)
        return Answer(message["content"] or "", calls, choice["finish_reason"])

    def streamed(self, events):
        content, calls, end = "", [], None
        for choice in (choice for event in events for choice in event["choices"]):
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
            end = choice["finish_reason"] or end
        return Answer(content, tuple(map(tuple, calls)), end)


class Responses:
    """OpenAI's responses."""

    path = "/v1/responses"
    limit, stop = "max_output_tokens", None
    ends: ClassVar = {"length": "incomplete", "calls": "completed"}
    forced = "required"
    named: ClassVar = {"type": "function", "name": "add"}

    def body(self, **fields):
        tool = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
        return {"input": "Hi", "tools": [tool], **fields}

    def whole(self, answer):
        texts = [item["content"][0]["text"] for item in answer["output"] if "content" in item]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        named = tuple((call["name"], call["arguments"]) for call in calls)
        return Answer("".join(texts), named, answer["status"])

    def streamed(self, events):
        content = "".join(e["delta"] for e in events if e["type"].endswith("output_text.delta"))
        items = [e["item"] for e in events if e["type"] == "response.output_item.added"]
        names = [item["name"] for item in items if item["type"] == "function_call"]
        done = [e["arguments"] for e in events if e["type"].endswith("arguments.done")]
        deltas = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
        assert "".join(done) == "".join(deltas)
        status = events[-1]["response"]["status"]
        return Answer(content, tuple(zip(names, done, strict=True)), status)


class Messages:
    """Anthropic's messages. A whole message has the arguments' values instead of their text."""

    path = "/v1/messages"
    limit, stop = "max_tokens", "stop_sequences"
    ends: ClassVar = {"length": "max_tokens", "stop": "stop_sequence", "calls": "tool_use"}
    forced: ClassVar = {"type": "any"}
    named: ClassVar = {"type": "tool", "name": "add"}

    def body(self, **fields):
        tool = {"name": "add", "input_schema": SCHEMA}
        return {"messages": MESSAGES, "tools": [tool], "max_tokens": 200, **fields}

    def whole(self, answer):
        texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        named = tuple((call["name"], json.dumps(call["input"])) for call in calls)
        return Answer("".join(texts), named, answer["stop_reason"])

    def streamed(self, events):
        starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        names = [block["name"] for block in starts if block["type"] == "tool_use"]
        arguments, content = [], ""
        for event in events:
            if event["type"] == "content_block_start" and event["content_block"].get("name"):
                arguments.append("")
            delta = event.get("delta", {})
            if delta.get("type") == "input_json_delta":
                arguments[-1] += delta["partial_json"]
            content += delta.get("text", "")
        end = next(e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta")
        return Answer(content, tuple(zip(names, arguments, strict=True)), end)


PROTOCOLS = [Chats(), Responses(), Messages()]


async def answers(server, api, **fields):
    """The whole answer and the streamed one."""
    body = api.body(**fields)
    streamed = api.streamed(await events_of(server, api.path, body))
    return api.whole(await whole(server, api.path, body)), streamed


@pytest.mark.parametrize("is_named", [False, True])
async def test_a_limit_that_cuts_a_forced_call_leaves_no_content(is_named):
    arguments = '{"a":"some text"}'
    text = arguments if is_named else f'[{{"name":"add","parameters":{arguments}}}]'
    async with running(text) as server:
        for api in PROTOCOLS:
            choice = api.named if is_named else api.forced
            num_calls = []
            for limit in range(1, len(script_of(text)), 2):
                fields = {api.limit: limit, "tool_choice": choice}
                for answer in await answers(server, api, **fields):
                    assert (answer.content, answer.end) == ("", api.ends["length"])
                    num_calls.append(len(answer.calls))
                    for name, written in answer.calls:
                        assert name == "add"
                        compact = written.replace('": "', '":"')
                        assert compact == "{}" or arguments.startswith(compact)
            assert num_calls[::2] == num_calls[1::2] == sorted(num_calls[::2])
            assert num_calls[-1] == 1


@pytest.mark.parametrize(
    ("text", "choice", "end", "arguments"),
    [
        ('{"a":"one END two"}', "named", "stop", '{"a":"one '),
        ('[{"name":"add","parameters":{"a":"one END two"}}]', "forced", "stop", '{"a":"one '),
        ('<tool_call>{"name":"add","arguments":{"a":"END"}}', None, "stop", '{"a":"'),
        ('<tool_call>{"name":"add","arguments":{}}</tool_call> END', None, "calls", "{}"),
        ('<tool_call>{"name":"add","arguments":{}}END', None, "calls", "{}"),
    ],
)
async def test_a_stop_text_within_arguments_is_no_end_of_a_call(text, choice, end, arguments):
    async with running(text, tool_call_parser="hermes") as server:
        for api in (PROTOCOLS[0], PROTOCOLS[2]):
            fields = {"tool_choice": getattr(api, choice)} if choice else {}
            answer, streamed = await answers(server, api, **fields, **{api.stop: ["END"]})
            # A whole message of Anthropic's API has the values that are whole.
            assert answer.calls in ((("add", arguments),), (("add", "{}"),))
            assert streamed.calls == (("add", arguments),)
            assert (answer.content, answer.end) == ("", api.ends[end])
            assert (streamed.content, streamed.end) == ("", api.ends[end])


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": "one\ntwo\t"}', {"a": "one\ntwo\t"}),
        ("{'a': True, 'b': None}", {"a": True, "b": None}),
        ('{"a": "\\d", "b": [1,],}', {"a": "\\d", "b": [1]}),
        ('"{\\"a\\": \\"x\\ny\\"}"', {"a": "x\ny"}),
    ],
)
async def test_arguments_are_json(arguments, value):
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    async with running(text, tool_call_parser="hermes") as server:
        for api in PROTOCOLS:
            for answer in await answers(server, api):
                ((name, written),) = answer.calls
                assert (answer.content, answer.end, name) == ("", api.ends["calls"], "add")
                assert json.loads(written) == value
