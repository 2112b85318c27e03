"""OpenAI's messages and tools: what is taken, in which form, and how refusals name it."""

import pytest

from baton.common.errors import InvalidArgumentError
from router.chat.messages import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, conversation_of

USER = {"role": "user", "content": "Hi"}


def one(message):
    (checked,) = conversation_of([message]).messages
    return checked


def call(arguments='{"x": 1}', **fields):
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}} | (
        fields
    )


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_known_roles_are_kept(role):
    assert one({"role": role, "content": "Hi"}) == {"role": role, "content": "Hi"}


def test_a_chat_without_options_has_a_generation_prompt_and_no_tools():
    conversation = conversation_of([USER])
    assert (conversation.tools, conversation.documents) == ((), ())
    assert (conversation.add_generation_prompt, conversation.continue_final_message) == (
        True,
        False,
    )
    assert conversation.template_kwargs == {}


def test_text_parts_become_parts_of_one_type():
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "b"},
        {"type": "output_text", "text": "c", "annotations": []},
        {"type": "refusal", "refusal": "d"},
        "e",
    ]
    texts = [part["text"] for part in one({"role": "user", "content": parts})["content"]]
    assert texts == ["a", "b", "c", "d", "e"]
    assert one({"role": "user", "content": parts})["content"][3] == {"type": "text", "text": "d"}


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "file", "video_url"])
def test_other_parts_are_refused_by_name(kind):
    messages = [USER, USER, {"role": "user", "content": [{"type": kind, kind: {}}]}]
    with pytest.raises(InvalidArgumentError) as error:
        conversation_of(messages)
    assert error.value.message == (
        f"messages[2].content[0].type is '{kind}'; Baton serves text only"
    )


def test_null_fields_are_unset():
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": None}
    assert one(message) == {"role": "assistant"}
    assert conversation_of([USER], tools=None, documents=None, template_kwargs=None).tools == ()


def test_known_and_unknown_fields_stay():
    message = {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f", "extra": [1]}
    assert one(message) == message


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_both_of_its_names(name):
    message = {"role": "assistant", "content": "a", name: "r"}
    assert one(message) == message | {"reasoning": "r", "reasoning_content": "r"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": {"y": [1, null, "ü"]}}', {"x": {"y": [1, None, "ü"]}}),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        (None, {}),
        ("{}", {}),
        ("null", {}),
        ('{"x": "cut sho', {}),
        ("[1]", {}),
        ("[" * 100_000, {}),
        ("9" * 5000, {}),
    ],
)
def test_arguments_of_calls_become_objects(arguments, expected):
    checked = one({"role": "assistant", "content": None, "tool_calls": [call(arguments)]})
    assert checked["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}}
    ]


def test_the_callers_message_is_not_changed():
    message = {"role": "assistant", "tool_calls": [call()]}
    one(message)
    assert message == {"role": "assistant", "tool_calls": [call()]}


def test_an_empty_list_of_calls_is_unset():
    assert "tool_calls" not in one({"role": "assistant", "content": "a", "tool_calls": []})


def assistant(*calls):
    return {"role": "assistant", "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "messages is missing; it must be an array"),
        ("Hi", "messages is .+; it must be an array"),
        ({}, "messages is .+; it must be an array"),
        ([], "messages is empty"),
        ([USER, "Hi"], r"messages\[1\] is .+; it must be a JSON object"),
        ([{"content": "Hi"}], r"messages\[0\].role is missing; it must be a text"),
        ([USER | {"role": 5}], r"messages\[0\].role is .+; it must be a text"),
        ([USER | {"role": "robot"}], r"messages\[0\].role is 'robot'; it must be one of system"),
        ([USER | {"role": "x" * 9999}], r"messages\[0\].role is 'x{50,70}\.\.\.x+'; "),
        ([USER | {"content": 5}], r"messages\[0\].content is 5; it must be a text or an array of"),
        ([USER | {"content": b"x"}], r"messages\[0\].content is b.x.; it must be a text or an"),
        ([USER | {"content": [5]}], r"messages\[0\].content\[0\] is .+; it must be a JSON object"),
        ([USER | {"content": [{}]}], r"messages\[0\].content\[0\].type is missing"),
        (
            [USER | {"content": [{"type": "text"}]}],
            r"messages\[0\].content\[0\].text is missing; it must be a text",
        ),
        (
            [USER | {"content": [{"type": "refusal", "text": "x"}]}],
            r"messages\[0\].content\[0\].refusal is missing",
        ),
        ([USER | {"name": 5}], r"messages\[0\].name is .+; it must be a text"),
        ([USER | {"tool_call_id": []}], r"messages\[0\].tool_call_id is .+; it must be a text"),
        ([USER | {"reasoning": {}}], r"messages\[0\].reasoning is .+; it must be a text"),
        (
            [USER | {"role": "assistant", "tool_calls": {}}],
            r"\[0\].tool_calls is {}; it must be an array",
        ),
        ([assistant("f")], r"messages\[0\].tool_calls\[0\] is \'f\'; it must be a JSON object"),
        ([assistant(call(type="custom"))], r"tool_calls\[0\].type is 'custom'; it must be 'func"),
        ([assistant(call(function=None))], r"tool_calls\[0\].function is missing"),
        ([assistant(call(function={}))], r"tool_calls\[0\].function.name is missing"),
        (
            [USER, USER, USER, assistant(call(), call([1]))],
            r"messages\[3\].tool_calls\[1\].function.arguments is .+; it must be a JSON object",
        ),
        (
            [USER | {"content": ["x"] * 9}] * MAX_MESSAGES,
            "messages has 36864 parts and tool calls; at most 32768 are allowed",
        ),
        ([assistant(*[call("[" + "[]," * 999 + "[]]")] * 200)], "arguments has more than 131072"),
        ([USER] * (MAX_MESSAGES + 1), f"messages has {MAX_MESSAGES + 1} elements; at most"),
        ([USER | {"content": ["x"] * (MAX_PARTS + 1)}], r"messages\[0\].content has"),
        ([assistant(*[call()] * (MAX_PARTS + 1))], r"messages\[0\].tool_calls has"),
    ],
)
def test_broken_messages_are_refused_by_path(messages, reason):
    with pytest.raises(InvalidArgumentError, match=reason) as error:
        conversation_of(messages)
    assert len(error.value.message) < 400


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_tools_stay_as_they_are():
    tools = [FUNCTION, {"type": "function", "function": {"name": "g", "strict": True}}]
    assert conversation_of([USER], tools=tools).tools == tuple(tools)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tools": {}}, "tools is .+; it must be an array"),
        ({"tools": ["f"]}, r"tools\[0\] is .+; it must be a JSON object"),
        ({"tools": [FUNCTION, {"type": "custom"}]}, r"tools\[1\].type is 'custom'; it must be"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function is missing"),
        ({"tools": [{"function": {"name": ""}}]}, r"tools\[0\].function.name is empty"),
        (
            {"tools": [{"function": {"name": 1}}]},
            r"tools\[0\].function.name is 1; it must be a text",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": "x"}}]},
            r"tools\[0\].function.parameters is .+; it must be a JSON object",
        ),
        ({"tools": [FUNCTION] * (MAX_TOOLS + 1)}, f"tools has {MAX_TOOLS + 1} elements"),
        ({"documents": ["text"]}, r"documents\[0\] is .+; it must be a JSON object"),
        ({"documents": "text"}, "documents is .+; it must be an array"),
        ({"documents": [{}] * (MAX_TOOLS + 1)}, f"documents has {MAX_TOOLS + 1} elements"),
        ({"template_kwargs": []}, "chat_template_kwargs is .+; it must be a JSON object"),
    ],
)
def test_other_broken_fields_are_refused_by_path(arguments, reason):
    with pytest.raises(InvalidArgumentError, match=reason):
        conversation_of([USER], **arguments)
