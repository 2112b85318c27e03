"""Reasoning parsers, and `ChatOutput`: reasoning, content and tool calls in one answer."""

import pytest

from baton.common.errors import ConfigurationError
from baton.common.request.answer import ChatDelta
from router.chat.output import ChatOutput, ToolCall, join_deltas, whole_answer
from router.chat.reasoning_parsers import ReasoningParser, reasoning_parser
from router.chat.tool_parsers import ToolParser, forced_tool_parser, tool_parser
from tests.support.chat_parsers import answer_of, check_cuts, output_of

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
F1 = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("name", "text", "content", "reasoning"),
    [
        ("deepseek_r1", "", "", None),
        ("deepseek_r1", "hm</think>yes", "yes", "hm"),
        ("deepseek_r1", " hm</think>\n\nyes", "\n\nyes", " hm"),
        ("deepseek_r1", "<think>hm</think>yes", "yes", "hm"),
        ("deepseek_r1", "\n<think>hm <thi </thin </think>yes", "yes", "hm <thi </thin "),
        ("deepseek_r1", "hm</thin", None, "hm</thin"),
        ("deepseek_r1", "hm</think>", None, "hm"),
        ("deepseek_r1", "</think>a</think>", "a</think>", None),
        ("qwen3", "yes", "yes", None),
        ("qwen3", "<thi", "<thi", None),
        ("qwen3", "yes<think>hm</think>", "yes<think>hm</think>", None),
        ("qwen3", "<think>\nhm\n</think>\n\nyes", "\n\nyes", "\nhm\n"),
        ("qwen3", "<think>hm", None, "hm"),
        ("mistral", "[THINK]hm[/THINK]yes", "yes", "hm"),
        (
            "granite",
            "Here is my thought process: hm. Here is my response: yes",
            " yes",
            " hm. ",
        ),
        ("granite", "Here's my thought process: hm. Here's my response: a", " a", " hm. "),
        ("granite", "<think>hm</think>\n<response>yes</response>\n", "yes", "hm"),
        ("granite", "<response>yes</resp", "yes</resp", None),
        ("granite", "<think>hm</think>\n<resp</response> a", "\n<resp</response> a", "hm"),
        ("gemma4", "<|channel>thought\nhm\n<channel|>yes", "yes", "\nhm\n"),
        ("gemma4", "yes", "yes", None),
        ("glm45", "\n<think>hm</think>\nyes", "\nyes", "hm"),
    ],
)
def test_reasoning_and_content(name, text, content, reasoning):
    check_cuts(output_of(reasoning=reasoning_parser(name)), text, (content, reasoning, []))


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("Hi<think>\n", True),
        ("Hi<think>\n\n</think>\n\n", False),
        ("Hi", None),
        ("<think> in the question", None),
    ],
)
def test_a_prompt_may_open_or_close_the_reasoning_part(prompt, is_open):
    parser = reasoning_parser("qwen3")
    assert parser.is_open_after(prompt) is is_open
    answer = answer_of(output_of(reasoning=lambda: parser(is_open)), ["a"])
    assert answer == ((None, "a", []) if is_open else ("a", None, []))


def test_the_prompt_decides_whether_an_answer_begins_with_reasoning():
    r1, qwen = reasoning_parser("deepseek_r1"), reasoning_parser("qwen3")
    assert answer_of(output_of(reasoning=lambda: r1(False)), ["yes"]) == ("yes", None, [])
    assert answer_of(output_of(reasoning=lambda: qwen(True)), ["hm</think>yes"]) == (
        "yes",
        "hm",
        [],
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"hm {CALL}</think>\n\n{CALL}", (None, f"hm {CALL}", [F1])),
        (f"hm</think>yes\n{CALL}", ("yes\n", "hm", [F1])),
        ("hm</think>\n\n", ("\n\n", "hm", [])),
        ("hm</think>yes <tool_ca", ("yes <tool_ca", "hm", [])),
    ],
)
def test_calls_are_looked_for_behind_the_reasoning_part(text, expected):
    make = output_of(tool_parser("hermes"), reasoning_parser("deepseek_r1"))
    check_cuts(make, text, expected)


def test_text_without_parsers_is_content():
    check_cuts(output_of(), f"<think>{CALL}", (f"<think>{CALL}", None, []))


def test_calls_after_the_first_are_dropped_if_the_request_allows_one():
    make = output_of(tool_parser("hermes"), parallel_tool_calls=False)
    check_cuts(make, f"Hi {CALL} and {CALL}", ("Hi  and ", None, [F1]))


def test_whitespace_beside_calls_is_dropped_up_to_a_length():
    make = output_of(tool_parser("hermes"))
    check_cuts(make, " " * 256 + CALL, (None, None, [F1]))
    assert answer_of(make, [" " * 257, CALL]) == (" " * 257, None, [F1])
    assert answer_of(make, " " * 257 + CALL) == (" " * 257, None, [F1])


@pytest.mark.parametrize(
    ("choice", "text", "calls"),
    [
        ("required", '[{"name": "f", "parameters": {"a": 1}}]', [F1]),
        ({"type": "function", "function": {"name": "f"}}, ' {"a": 1}', [F1]),
        ({"type": "function", "function": {"name": "f"}}, '{"a', [("f", '{"a')]),
        ({"type": "function", "function": {"name": "f"}}, " ", []),
        # Cut: a call begins when its name is complete.
        ("required", '[{"na', []),
        ("required", '[{"name":"f', []),
        ("required", '[{"name":"f"', [("f", "")]),
        ("required", '[{"name":"f","', [("f", "")]),
        ("required", '[{"name":"f","parameters":', [("f", "")]),
        ("required", '[{"name":"f","parameters":{"a":"x', [("f", '{"a":"x')]),
        ("required", '[{"name":"f","parameters":{"a": 1}', [F1]),
        ("required", '[{"name":"f","parameters":{"a": 1}},{"name":"g', [F1]),
        ("required", '[{"name":"f","parameters":{"a": 1}},{"name":"g","', [F1, ("g", "")]),
        ("required", '[{"name":"f"}]', [("f", "{}")]),
        ("required", '{"parameters": {"a": 1}, "name": "f"}', [F1]),
    ],
)
def test_forced_calls(choice, text, calls):
    content = None if calls else ""
    check_cuts(output_of(lambda: forced_tool_parser(choice)), text, (content, None, calls))


def test_text_that_has_not_the_forced_form_is_content():
    make = output_of(lambda: forced_tool_parser("required"))
    check_cuts(make, "Hi [1]", ("Hi [1]", None, []))
    check_cuts(make, '[{"x": ]', ('[{"x": ]', None, []))


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_a_choice_that_forces_no_call_has_no_parser(choice):
    assert forced_tool_parser(choice) is None


def test_arguments_are_streamed_as_they_come():
    output = ChatOutput(None, tool_parser("hermes")())
    pieces = ['Hi<tool_call>{"name": "f", "arg', 'uments": {"a', '": "long', " text", '"}}</tool']
    deltas = [output.push(piece) for piece in pieces]
    assert [delta.content for delta in deltas] == ["Hi", "", "", "", ""]
    calls = [delta.tool_calls for delta in deltas]
    assert calls[0] == ()
    assert [(call.name, call.arguments) for call in calls[1]] == [("f", '{"a')]
    assert [call.arguments for (call,) in calls[2:]] == ['": "long', " text", '"}']
    assert output.finish() == ChatDelta()


def test_ids_of_calls_are_unique():
    deltas = [ChatOutput(None, tool_parser("hermes")()).push(CALL * 2) for _ in range(2)]
    ids = [call.id for delta in deltas for call in delta.tool_calls]
    assert len(set(ids)) == 4
    assert all(call_id.startswith("call_") for call_id in ids)


def test_joined_deltas_are_one_delta():
    output = ChatOutput(None, tool_parser("hermes")())
    deltas = [*map(output.push, "a" + CALL + "b" + CALL), output.finish()]
    joined = join_deltas(deltas)
    assert joined.content == "ab"
    assert [call.index for call in joined.tool_calls] == [0, 1]
    assert whole_answer(deltas).tool_calls == tuple(
        ToolCall(call.id, "f", '{"a": 1}') for call in joined.tool_calls
    )


class Shout(ToolParser):
    """A parser of another package: the whole text is a call."""

    def push(self, text):
        return ChatDelta(content=text.upper())

    def finish(self):
        return ChatDelta()


@pytest.mark.parametrize(
    ("load", "base", "name", "message"),
    [
        (tool_parser, ToolParser, "x", "--tool-call-parser: unknown name 'x'; .*hermes, json"),
        (tool_parser, ToolParser, f"{__name__}:F1", "is no ToolParser class"),
        (tool_parser, ToolParser, "no_such:X", "--tool-call-parser: .* cannot be imported"),
        (reasoning_parser, ReasoningParser, "x", "--reasoning-parser: unknown .*deepseek_r1"),
        (reasoning_parser, ReasoningParser, f"{__name__}:Shout", "is no ReasoningParser class"),
    ],
)
def test_unknown_parsers_are_refused_by_name(load, base, name, message):
    with pytest.raises(ConfigurationError, match=message):
        load(name)


def test_a_parser_may_be_given_as_a_class():
    assert tool_parser(f"{__name__}:Shout") is Shout
