"""Bodies of the Responses API as chats."""

import logging

import pytest

from baton.common.errors import InvalidArgumentError
from router.http.responses_request import ResponsesBody, read_responses_request
from router.http.responses_tools import tools_of

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
CUSTOM = {"type": "custom", "name": "patch", "description": "Patches."}
NAMESPACE = {"type": "namespace", "name": "crm", "description": "d", "tools": [TOOL, CUSTOM]}
OTHER = {"type": "function", "name": "sub", "description": "Subtracts."}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(**fields):
    return read_responses_request(ResponsesBody.model_validate({"input": "Hi"} | fields), "id")


def messages(given, **fields):
    conversation = read(input=given, **fields).chat.conversation
    return [dict(message) for message in conversation.messages]


def refused(**fields):
    with pytest.raises(InvalidArgumentError) as caught:
        read(**fields)
    return caught.value.message


def test_a_text_and_instructions_are_two_messages():
    assert messages("Hi", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_messages_keep_their_roles_and_the_text_of_their_parts():
    items = [
        {"role": "developer", "content": "Rules."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "c", "annotations": []},
                {"type": "refusal", "refusal": "d"},
            ],
        },
        {"role": "user", "content": "e"},
    ]
    assert messages(items) == [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c\nd"},
        {"role": "user", "content": "e"},
    ]


def test_a_turn_with_reasoning_text_and_calls_is_one_message():
    reasoning = {"id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
    items = [
        {"role": "user", "content": "1+1?"},
        {"type": "reasoning", **reasoning},
        {"role": "assistant", "content": "Let me see."},
        call,
        {**call, "call_id": "c2", "arguments": '{"a": "cut sho'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "none"}],
        },
    ]
    _, turn, *results = messages(items)
    assert turn["content"] == "Let me see."
    assert turn["reasoning_content"] == "r"
    assert [(c["id"], c["function"]["arguments"]) for c in turn["tool_calls"]] == [
        ("c1", {"a": 1}),
        ("c2", {}),
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "none"},
    ]


def test_reasoning_known_by_its_summary_or_its_encrypted_form():
    item = {"type": "reasoning", "id": "rs_1", "encrypted_content": "x", "summary": []}
    user = {"role": "user", "content": "Hi"}
    assert messages([user, item]) == [user]
    item["summary"] = [{"type": "summary_text", "text": "s"}]
    assert messages([user, item])[1]["reasoning_content"] == "s"


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "input is empty"),
        ([{"role": "someone", "content": "x"}], "input[0].role is 'someone'"),
        ([{"role": "user"}], "input[0].content is missing"),
        ([{"role": "user", "content": 1}], "input[0].content is 1"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}],
            "input[0].content[0].type is 'input_image'; it is not supported",
        ),
        (
            [{"role": "user", "content": [{"type": "output_text", "text": "u"}]}],
            "input[0].content[0].type is 'output_text'; it must be one of input_text",
        ),
        ([{"role": "user", "content": "\ud800"}], "input[0].content is not valid Unicode"),
        ([{"type": "computer_call", "id": "cu"}], "input[0].type is 'computer_call'"),
        ([{"type": "item_reference", "id": "msg_1"}], "Baton stores no responses"),
        ([{}], "input[0].type is None"),
        (
            [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}],
            "input[0].arguments is {}; it must be a text",
        ),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id is missing"),
    ],
)
def test_malformed_items_are_named_by_their_path(items, message):
    assert message in refused(input=items)


def test_parameters_become_those_of_sampling():
    request = read(
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=7,
        seed=3,
        min_p=0.125,
        priority=-2,
        cache_salt="tenant",
        parallel_tool_calls=False,
        truncation="auto",
    ).chat
    assert request.params == {
        "temperature": 0.5,
        "top_p": 0.25,
        "max_tokens": 7,
        "seed": 3,
        "min_p": 0.125,
        "truncate_prompt_tokens": -1,
    }
    assert (request.request_id, request.priority, request.cache_salt) == ("id", -2, "tenant")
    assert not request.parallel_tool_calls


def test_nulls_are_unset():
    names = set(ResponsesBody.model_fields) - {"input"}
    nulls = dict.fromkeys([*names, "previous_response_id", "conversation", "background"])
    assert read(**nulls) == read()
    assert read().chat.params == {}


def test_logprobs_are_asked_for_by_include():
    assert "logprobs" not in read(top_logprobs=3).chat.params
    request = read(top_logprobs=3, include=["message.output_text.logprobs"])
    assert request.chat.params["logprobs"] == 3
    assert request.includes_logprobs
    assert not read(include=["reasoning.encrypted_content"]).includes_logprobs


@pytest.mark.parametrize(
    ("form", "field", "value"),
    [
        ({"type": "json_object"}, "json_object", True),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
            "json",
            '{"type":"object","properties":{"a":{"type":"integer"}}}',
        ),
    ],
)
def test_text_format_becomes_structured_outputs(form, field, value):
    outputs = read(text={"format": form}).chat.params["structured_outputs"]
    assert getattr(outputs, field) == value
    assert "text.format" in refused(text={"format": form}, structured_outputs={"regex": "a"})


def test_the_text_format_text_asks_for_no_structured_outputs():
    request = read(text={"format": {"type": "text"}, "verbosity": "low"})
    assert request.chat.params == {}
    assert request.echo["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def test_reasoning_effort_is_a_variable_of_the_template():
    kwargs = read(reasoning={"effort": "low"}).chat.conversation.template_kwargs
    assert kwargs == {"reasoning_effort": "low"}
    request = read(reasoning={"effort": "none"}, chat_template_kwargs={"x": 1})
    kwargs = request.chat.conversation.template_kwargs
    assert kwargs == {"reasoning_effort": "none", "enable_thinking": False, "x": 1}
    assert request.echo["reasoning"] == {"effort": "none", "summary": None}


def test_tools_are_those_of_the_chat_api():
    request = read(tools=[TOOL, OTHER], tool_choice={"type": "function", "name": "sub"})
    first, second = request.chat.conversation.tools
    assert first["function"] == {"name": "add", "parameters": {"type": "object"}, "strict": True}
    assert second["function"] == {"name": "sub", "description": "Subtracts."}
    assert request.chat.tool_choice == {"type": "function", "function": {"name": "sub"}}
    assert request.echo["tool_choice"] == {"type": "function", "name": "sub"}
    assert read(tools=[TOOL]).echo["tool_choice"] == "auto"


HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
    *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell"),
    *("tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
)


@pytest.mark.parametrize("choice", [None, "auto", "none", "required"])
def test_tools_that_a_server_would_run_are_left_out(choice, caplog):
    caplog.set_level(logging.INFO, "baton.http")
    hosted = [{"type": kind, "server_label": "x"} for kind in HOSTED]
    request = read(tools=[hosted[0], TOOL, *hosted[1:]], tool_choice=choice)
    names = [tool["function"]["name"] for tool in request.chat.conversation.tools]
    assert names == ["add"]
    assert request.echo["tools"][0] == hosted[0]
    (record,) = caplog.records
    assert all(kind in record.getMessage() for kind in HOSTED)
    assert "request_id='id'" in record.getMessage()


def test_hosted_tools_alone_leave_a_chat_without_tools():
    request = read(tools=[{"type": "web_search"}])
    assert request.chat.conversation.tools == ()


def test_a_custom_tool_is_a_function_with_one_text():
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    request = read(tools=[CUSTOM | {"format": grammar}], tool_choice={**CUSTOM})
    ((function,),) = ([t["function"] for t in request.chat.conversation.tools],)
    assert function["name"] == "patch"
    assert function["description"].startswith("Patches.\n")
    assert "grammar (lark):\nstart: /a+/" in function["description"]
    assert function["parameters"]["required"] == ["input"]
    assert request.chat.tool_choice == {"type": "function", "function": {"name": "patch"}}
    assert request.tools["patch"].is_custom
    assert request.echo["tools"] == [CUSTOM | {"format": grammar}]


def test_tools_in_a_namespace_are_offered_by_their_whole_name():
    others = NAMESPACE | {"name": "mcp__git__", "tools": [OTHER]}
    request = read(tools=[NAMESPACE, others, TOOL])
    names = [tool["function"]["name"] for tool in request.chat.conversation.tools]
    assert names == ["crm__add", "crm__patch", "mcp__git__sub", "add"]
    assert request.tools["crm__patch"].is_custom

    def chosen(**choice):
        return read(tools=[NAMESPACE, others, TOOL], tool_choice=choice).chat.tool_choice

    assert chosen(type="function", name="sub")["function"]["name"] == "mcp__git__sub"
    assert chosen(type="function", name="add")["function"]["name"] == "add"
    assert chosen(type="function", name="add", namespace="crm")["function"]["name"] == "crm__add"


def test_earlier_calls_of_custom_tools_and_servers():
    items = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "q"}},
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'x "y"\n'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {
            "type": "function_call",
            "call_id": "c2",
            "name": "add",
            "namespace": "crm",
            "arguments": "{}",
        },
    ]
    _, answer, result, last = messages(items)
    assert answer["content"] == '[web_search_call {"action":{"query":"q"}}]'
    assert answer["tool_calls"][0]["function"] == {
        "name": "patch",
        "arguments": {"input": 'x "y"\n'},
    }
    assert (result["role"], result["content"]) == ("tool", "done")
    assert last["tool_calls"][0]["function"]["name"] == "crm__add"


def test_allowed_tools_are_the_only_ones_that_the_model_reads():
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "sub"}]}
    request = read(tools=[TOOL, OTHER], tool_choice=allowed)
    assert request.chat.tool_choice == "required"
    assert [tool["function"]["name"] for tool in request.chat.conversation.tools] == ["sub"]
    assert request.chat.schema_fields == ("tools[1].parameters",)
    assert len(request.echo["tools"]) == 2


class ComparedName(str):
    """A name that counts how often names are compared."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        ComparedName.num_compared += 1
        return str.__eq__(self, other)


def test_the_cost_of_tools_grows_with_their_number():
    names = [ComparedName(f"f{i}") for i in range(1000)]
    tools = [
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": name}]}
        for name in names
    ]
    allowed = {"type": "allowed_tools", "tools": [{"name": ComparedName(name)} for name in names]}
    assert len(tools_of(tools, None).tools) == 1000
    assert len(tools_of(tools, allowed).tools) == 1000
    assert ComparedName.num_compared < 20_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "functoin", "name": "f"}]}, "tools[0].type is 'functoin'"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice is 'required', but tools has no tool that Baton can offer",
        ),
        (
            {"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice.type is 'web_search'",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0].name is missing"),
        (
            {"tools": [CUSTOM | {"format": {"type": "grammar", "syntax": "lark"}}]},
            "tools[0].format.definition is missing",
        ),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools is missing"),
        (
            {"tools": [NAMESPACE | {"tools": [{"type": "mcp", "name": "x"}]}]},
            "tools[0].tools[0].type is 'mcp'",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name is missing"),
        ({"tools": [TOOL | {"parameters": 1}]}, "tools[0].parameters is 1; it must be a JSON"),
        ({"tool_choice": "required"}, "tools is empty"),
        ({"tool_choice": "any"}, "tool_choice is 'any'"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type is 'file_search'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice.name is 'x'; it must be the name of one of tools: add",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"background": True}, "background is not supported"),
        ({"prompt": {"id": "p"}}, "prompt is not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type is 'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema is missi"),
        ({"n": 2}, "n is 2"),
        ({"use_beam_search": True}, "use_beam_search is set"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort is 1"),
    ],
)
def test_what_baton_lacks_is_refused_by_name(fields, message):
    assert message in refused(**fields)


def test_fields_without_effect_are_accepted():
    read(background=False, store=True, user="u", metadata={"a": "b"}, service_tier="auto")
    read(max_tool_calls=3, prompt_cache_key="k", stream_options={"include_obfuscation": False})


def test_the_answer_states_the_parameters_that_apply():
    body = ResponsesBody.model_validate({"input": "Hi", "top_p": 0.5})
    echo = read_responses_request(body, defaults={"temperature": 0.7, "top_p": 0.9}).echo
    assert (echo["temperature"], echo["top_p"]) == (0.7, 0.5)
    assert read().echo["temperature"] == 1.0
