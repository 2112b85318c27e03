"""Bodies of Anthropic's messages API as chats."""

import json

import pytest

from baton.common.errors import InvalidArgumentError
from router.http.anthropic_request import (
    MessagesBody,
    counted_conversation,
    read_messages_request,
)

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Hi"}


def read(messages=(USER,), marks=False, **fields):
    body = {"max_tokens": 8, "messages": list(messages)} | fields
    return read_messages_request(MessagesBody.model_validate(body), "id", can_limit_thinking=marks)


def messages(*given, **fields):
    return [dict(message) for message in read(given, **fields).conversation.messages]


def refused(*given, **fields):
    with pytest.raises(InvalidArgumentError) as caught:
        read(given or (USER,), **fields)
    return caught.value.message


def block(kind, **fields):
    return {"type": kind, **fields}


@pytest.mark.parametrize(("choice", "num_tools"), [("none", 0), ("auto", 1), (None, 1)])
def test_tools_that_a_message_drops_are_not_counted(choice, num_tools):
    body = {"messages": [USER], "tools": [TOOL]}
    body |= {"tool_choice": {"type": choice}} if choice else {}
    assert len(counted_conversation(MessagesBody.model_validate(body)).tools) == num_tools


def test_system_as_text_and_as_blocks():
    system = {"role": "system", "content": "Be brief.\nRhyme."}
    blocks = [
        block("text", text="Be brief.", cache_control={"type": "ephemeral"}),
        block("text", text="Rhyme."),
    ]
    assert messages(USER, system="Be brief.\nRhyme.") == [system, USER]
    assert messages(USER, system=blocks) == [system, USER]
    assert messages({"role": "system", "content": "Be brief.\nRhyme."}, USER) == [system, USER]


def test_consecutive_messages_of_a_user_are_one():
    given = [block("text", text="a"), block("text", text="b")]
    assert messages({"role": "user", "content": given}, {"role": "user", "content": "c"}) == [
        {"role": "user", "content": "a\nb\nc"}
    ]


def test_a_turn_with_thinking_text_and_calls_and_their_results():
    turn = [
        block("thinking", thinking="hm", signature=""),
        block("redacted_thinking", data="x"),
        block("text", text="Let me see."),
        block("tool_use", id="t1", name="add", input={"a": 1}),
        block("tool_use", id="t2", name="add", input={}),
    ]
    results = [
        block("tool_result", tool_use_id="t1", content="2"),
        block("tool_result", tool_use_id="t2", content=[block("text", text="x")], is_error=True),
        block("tool_result", tool_use_id="t3"),
        block("text", text="Go on."),
    ]
    given = messages(
        USER, {"role": "assistant", "content": turn}, {"role": "user", "content": results}
    )
    _, answer, *rest = given
    assert answer["content"] == "Let me see."
    assert answer["reasoning_content"] == "hm"
    assert [(call["id"], call["function"]["arguments"]) for call in answer["tool_calls"]] == [
        ("t1", {"a": 1}),
        ("t2", {}),
    ]
    assert rest == [
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": "x"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "Go on."},
    ]


def test_a_last_message_of_the_assistant_is_continued():
    conversation = read([USER, {"role": "assistant", "content": "The answer"}]).conversation
    assert conversation.continue_final_message
    assert not conversation.add_generation_prompt
    assert not read().conversation.continue_final_message


@pytest.mark.parametrize("content", ["", []])
def test_an_empty_last_message_of_the_assistant_is_left_out(content):
    conversation = read([USER, {"role": "assistant", "content": content}]).conversation
    assert list(conversation.messages) == [USER]
    assert not conversation.continue_final_message


TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "Rain."}
PARTS = {"type": "content", "content": [block("text", text="Rain."), block("text", text="Sun.")]}
HIT = {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "x"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (block("document", source=TEXT_SOURCE), "Rain."),
        (block("document", source=TEXT_SOURCE, title="A", context="B"), "A\nB\nRain."),
        (block("document", source=PARTS), "Rain.\nSun."),
        (
            block("search_result", title="T", source="u", content=[block("text", text="Rain.")]),
            "T\nu\nRain.",
        ),
        (block("tool_reference", tool_name="grep"), "[tool grep]"),
    ],
)
def test_blocks_that_have_text_are_text(given, text):
    assert messages({"role": "user", "content": [given]}) == [{"role": "user", "content": text}]
    result = block("tool_result", tool_use_id="t", content=[given])
    (message,) = messages({"role": "user", "content": [result]})
    assert message["content"] == text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (block("server_tool_use", id="s", name="web_search", input={"query": "q"}), None),
        (block("mcp_tool_use", id="s", name="web_search", input={"query": "q"}), None),
        (
            block("web_search_tool_result", tool_use_id="s", content=[HIT]),
            '[result: {"content":[{"title":"T","url":"u"}]}]',
        ),
        (
            block("web_search_tool_result", tool_use_id="s", content={"error_code": "full"}),
            '[result: {"content":{"error_code":"full"}}]',
        ),
        (
            block(
                "web_fetch_tool_result",
                tool_use_id="s",
                content={"url": "u", "content": block("document", source=TEXT_SOURCE)},
            ),
            '[result: {"content":{"url":"u","content":"Rain."}}]',
        ),
        (
            block("bash_code_execution_tool_result", tool_use_id="s", content={"stdout": "1"}),
            '[result: {"content":{"stdout":"1"}}]',
        ),
        (
            block("mcp_tool_result", tool_use_id="s", content=[block("text", text="ok")]),
            "[result: ok]",
        ),
        (block("mcp_tool_result", tool_use_id="s", content="ok"), "[result: ok]"),
        (block("fallback"), ""),
        (block("redacted_thinking", data="x"), ""),
    ],
)
def test_what_anthropics_servers_did_is_text_of_the_answer(given, text):
    turn = {"role": "assistant", "content": [given, block("text", text="So.")]}
    _, answer, _ = messages(USER, turn, USER)
    text = '[web_search {"query":"q"}]' if text is None else text
    assert answer == {"role": "assistant", "content": f"{text}\nSo." if text else "So."}


def test_a_summary_stands_for_the_messages_before_it():
    turn = {"role": "assistant", "content": [block("compaction", content="We spoke.")]}
    assert messages(turn, USER) == [{"role": "user", "content": "We spoke.\nHi"}]
    turn["content"][0] = block("compaction", encrypted_content="x")
    assert "messages[0].content[0].content is missing" in refused(turn, USER)


def test_a_failed_call_without_text_is_an_error():
    result = block("tool_result", tool_use_id="t", is_error=True)
    (message,) = messages({"role": "user", "content": [result]})
    assert message["content"] == "error"


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ([block("text", text="{H}"), block("text", text="Rhyme.")], "Rhyme."),
        ([block("text", text="{H}\n\nRhyme.")], "Rhyme."),
        ([block("text", text="{H}")], None),
        ("{H}\nRhyme.", "Rhyme."),
        ("Rhyme.\n{H}", "Rhyme.\n{H}"),
    ],
)
def test_the_line_about_billing_is_no_part_of_the_prompt(system, text):
    """It differs in each request, so that nothing after it could be cached."""
    header = "x-anthropic-billing-header: cc_version=2.1.37.e5b; cc_entrypoint=cli; cch=00000;"
    given = json.loads(json.dumps(system).replace("{H}", header))
    expected = [] if text is None else [{"role": "system", "content": text.replace("{H}", header)}]
    assert messages(USER, system=given) == [*expected, USER]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user"}, "messages[0].content is missing"),
        ({"role": "tool", "content": "x"}, "messages[0].role is 'tool'"),
        ({"content": "x"}, "messages[0].role is missing"),
        ({"role": "user", "content": [block("image")]}, "messages[0].content[0].type is 'image'"),
        (
            {"role": "user", "content": [block("document")]},
            "messages[0].content[0].source is missing",
        ),
        (
            {"role": "user", "content": [block("document", source={"type": "base64"})]},
            "messages[0].content[0].source.type is 'base64'; it must be text or content, of text",
        ),
        (
            {"role": "user", "content": [block("container_upload", file_id="f")]},
            "messages[0].content[0].type is 'container_upload'; it must be of text",
        ),
        (
            {"role": "user", "content": [block("tool_use")]},
            "tool_result, compaction in a message of user",
        ),
        (
            {
                "role": "user",
                "content": [block("tool_result", tool_use_id="t", content=[block("image")])],
            },
            "messages[0].content[0].content[0].type is 'image'",
        ),
        ({"role": "user", "content": [block("text")]}, "messages[0].content[0].text is missing"),
        ({"role": "user", "content": "\udc00"}, "messages[0].content is not valid Unicode"),
        (
            {"role": "assistant", "content": [block("tool_use", id="t", name="f", input={"a": 1})]},
            "messages[0] ends with tool_use",
        ),
    ],
)
def test_malformed_messages_are_named_by_their_path(message, error):
    assert error in refused(message)


def test_parameters_become_those_of_sampling():
    request = read(
        temperature=0.5,
        top_p=0.25,
        top_k=5,
        stop_sequences=["END"],
        stop=["MORE"],
        seed=3,
        min_p=0.125,
        priority=1,
        metadata={"user_id": "u"},
    )
    assert request.params == {
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "stop": ["END", "MORE"],
        "seed": 3,
        "min_p": 0.125,
    }
    assert (request.request_id, request.priority) == ("id", 1)


def test_nulls_are_unset():
    names = set(MessagesBody.model_fields) - {"messages", "max_tokens"}
    assert read(**dict.fromkeys(names)) == read()


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tools_and_their_choice(choice, expected):
    request = read(tools=[TOOL], tool_choice=choice | {"disable_parallel_tool_use": True})
    assert request.tool_choice == expected
    assert not request.parallel_tool_calls
    (tool,) = request.conversation.tools
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert tool == {"type": "function", "function": function}
    assert read(tools=[TOOL], tool_choice=choice).parallel_tool_calls


@pytest.mark.parametrize("marks", [False, True])
def test_thinking_has_a_budget_if_the_model_has_marks(marks):
    request = read(marks=marks, thinking={"type": "enabled", "budget_tokens": 1024})
    assert request.conversation.template_kwargs == {"enable_thinking": True}
    assert request.params.get("thinking_token_budget") == (1024 if marks else None)


def test_thinking_is_off_or_without_a_budget():
    disabled = read(marks=True, thinking={"type": "disabled"})
    assert disabled.conversation.template_kwargs == {"enable_thinking": False}
    assert "thinking_token_budget" not in disabled.params
    adaptive = read(thinking={"type": "adaptive"}, output_config={"effort": "low"})
    expected = {"enable_thinking": True, "reasoning_effort": "low"}
    assert adaptive.conversation.template_kwargs == expected


def test_an_output_format_is_a_schema():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    request = read(output_config={"format": form})
    assert request.params["structured_outputs"].json == '{"type":"object"}'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type is 'web_sea"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema is missing"),
        ({"tools": [TOOL | {"input_schema": []}]}, "tools[0].input_schema is []; it must be a"),
        ({"tool_choice": {"type": "any"}}, "tools is empty"),
        ({"tool_choice": {}}, "tool_choice.type is missing"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice.name is 'x'; it must be the name of one of tools: add",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type is 'sometimes'"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17 entries"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type is 'xml'"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"n": 2}, "n is 2"),
    ],
)
def test_what_baton_lacks_is_refused_by_name(fields, message):
    assert message in refused(**fields)


def test_no_messages_are_refused():
    with pytest.raises(InvalidArgumentError, match="messages is empty"):
        read([])


def test_schemas_of_tools_are_named_as_the_client_sent_them():
    request = read(tools=[TOOL, TOOL | {"name": "sub", "strict": True}])
    assert request.schema_fields == ["tools[0].input_schema", "tools[1].input_schema"]
    assert [tool["function"].get("strict") for tool in request.conversation.tools] == [None, True]
