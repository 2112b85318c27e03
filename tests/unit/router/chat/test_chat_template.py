"""Rendering of chat templates: variables, errors, bounds, and what clients can send."""

import enum
import threading
from datetime import datetime

import pytest

from baton.common.errors import InvalidArgumentError
from router.chat.chat_request import Conversation
from router.chat.messages import conversation_of
from router.chat.template import MAX_PROMPT_CHARS, ChatTemplate, ends_in_reasoning
from tests.support.chat_cases import FAMILIES, source_of

USER = {"role": "user", "content": "Hi"}
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


def render(text, *messages, **arguments):
    template = ChatTemplate(source_of(default=text))
    return template.render(conversation_of(list(messages) or [USER], **arguments))


def refused(match, text, *messages, **arguments):
    with pytest.raises(InvalidArgumentError, match=match) as error:
        render(text, *messages, **arguments)
    assert len(error.value.message) < 1000
    error.value.message.encode()


def test_templates_read_tools_documents_and_kwargs():
    text = "{{ tools }} {{ documents }} {{ add_generation_prompt }} {{ x }} {{ undefined }}"
    assert render(text, template_kwargs={"x": 5}) == "None None True 5 "
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render("{{ tools[0].function.name }}", tools=tools) == "f"
    assert render("{{ documents[0].text }}", documents=[{"text": "d"}]) == "d"


def test_json_is_written_without_escapes():
    value = {"b": "<é>'", "a": [1, 2.5, None, True]}
    arguments = {"template_kwargs": {"value": value}}
    assert render("{{ value | tojson }}", **arguments) == (
        '{"b": "<é>\'", "a": [1, 2.5, null, true]}'
    )
    assert render("{{ value | tojson(sort_keys=true, separators=(',', ':')) }}", **arguments) == (
        '{"a":[1,2.5,null,true],"b":"<é>\'"}'
    )
    assert render("{{ value.b | tojson(ensure_ascii=true) }}", **arguments) == '"<\\u00e9>\'"'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_blocks_leave_no_lines_and_loops_have_controls():
    text = (
        "{% for i in range(5) %}\n  {% if i == 1 %}{% continue %}{% endif %}\n"
        "{% if i == 3 %}{% break %}{% endif %}\n{{ i }}\n{% endfor %}\nend"
    )
    assert render(text) == "0\n2\nend"


def test_the_generation_tag_has_its_own_scope():
    text = "{% set x = 1 %}{% generation %}a{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(text) == "a21"


def test_strftime_now_formats_the_present_time():
    year = render("{{ strftime_now('%Y') }}")
    assert abs(int(year) - datetime.now().year) <= 1


def test_null_fields_are_left_out_and_reasoning_has_all_its_names():
    text = "{% for key in messages[-1] %}{{ key }} {% endfor %}"
    assert render(text, {"role": "user", "content": "", "name": None}) == "role content "
    assert set(render(text, {"role": "assistant", "reasoning": "r"}).split()) == {
        "role",
        "content",
        "reasoning",
        "reasoning_content",
        "thinking",
    }


def test_a_template_that_does_not_know_developers_gets_system_messages():
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    assert render("{{ messages[0].role }}", *messages) == "system"
    assert render("{{ messages[0].role }} of a developer", *messages).startswith("developer")


@pytest.mark.parametrize(("family", "role"), [("glm4", "observation"), ("glm45", "tool")])
def test_results_of_tools_have_the_role_that_the_template_reads(family, role):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    template = ChatTemplate(source_of(default=FAMILIES[family]))
    conversation = conversation_of(messages)
    assert template.messages_for(conversation)[-1]["role"] == role
    assert "rain" in template.render(conversation)


LOOP_OVER_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }};{% else %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("text", "as_parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        (LOOP_OVER_PARTS, True),
        (LOOP_OVER_PARTS.replace("m.content", "m['content']"), True),
        (LOOP_OVER_PARTS.replace("in m.content", "in m.content | list"), True),
        (
            "{% set turns = messages[0:] %}{% set rest = turns %}"
            + LOOP_OVER_PARTS.replace("in messages", "in rest"),
            True,
        ),
        ("{% set turns = messages %}" + LOOP_OVER_PARTS.replace("in messages", "in turns"), True),
        ("{% for p in messages[0].content %}{{ p }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.tool_calls %}{% endfor %}{% endfor %}", False),
        (FAMILIES["gemma"], True),
        (FAMILIES["qwen3"], False),
    ],
)
def test_content_is_text_unless_the_template_loops_over_it(text, as_parts):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    seen = text + "|{% for n in messages %}{{ n.content | tojson }}{% endfor %}"
    prompt = render(seen, {"role": "user", "content": parts}, {"role": "tool", "content": parts})
    as_text = '"a\\nb"'
    shown = '[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]'
    assert prompt.endswith(f"|{shown if as_parts else as_text}{as_text}")


def test_missing_content_is_empty():
    text = "{{ messages[0].content | tojson }}"
    answer = {"role": "assistant", "content": None}
    assert render(text, answer) == '""'
    assert render(text + LOOP_OVER_PARTS, answer).startswith("[]")


def test_a_refusal_of_the_template_is_shown():
    refused("the chat template refuses the messages: No way.$", "{{ raise_exception('No way.') }}")
    refused("refuses the messages: x+[.]{3}$", "{{ raise_exception('x' * 9999) }}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 'a' + 5 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ undefined() }}", "'undefined' is undefined"),
        ("{{ {}.x | tojson }}", "not JSON serializable"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ namespace(_x=1) }}", "underscore"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"),
        ("{{ range(10 ** 9) }}", "too big"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_an_error_in_the_template_names_its_line(text, reason):
    refused(f"cannot render the messages: line 2: .*{reason}", "\n" + text)


def test_dict_and_namespace_functions():
    assert render("{{ dict([('a', 1)], b=2) }}{{ dict.fromkeys(['k'], 0) }}") == (
        "{'a': 1, 'b': 2}{'k': 0}"
    )
    text = "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.a = 3 %}{{ ns.a }}{{ ns.self }}"
    assert render(text) == "32"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "tokenize"]
)
def test_reserved_variables_are_refused(name):
    refused(
        f"chat_template_kwargs has the key '{name}', which is reserved",
        "",
        template_kwargs={name: None},
    )


def test_a_client_may_override_functions_only_for_itself():
    template = ChatTemplate(source_of(default="{{ range(2) | list }}{{ bos_token }}"))
    spoiled = conversation_of([USER], template_kwargs={"range": 1, "bos_token": "x"})
    with pytest.raises(InvalidArgumentError, match="not callable"):
        template.render(spoiled)
    assert template.render(conversation_of([USER])) == "[0, 1]<s>"


def test_the_final_message_is_continued():
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    answer = {"role": "assistant", "content": " So \n"}
    assert render(text, USER, answer, **CONTINUED) == "<user>Hi</><assistant>So"
    assert render(text.replace(" | trim", ""), USER, answer, **CONTINUED).endswith("> So \n")
    parts = {"role": "assistant", "content": [{"type": "text", "text": t} for t in "ab"]}
    assert render(text, USER, parts, **CONTINUED).endswith("<assistant>a\nb")
    assert render(LOOP_OVER_PARTS, USER, parts, **CONTINUED) == "[Hi];[a][b"


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Köln"}'),
        ("{{ c.function.arguments.city }}", "Köln"),
        ("{{ 'x' + c.function.arguments }}", 'x{"city": "Köln"}'),
        ("{% if m.content is none %}{{ c.function.arguments | tojson }}{% endif %}",) * 2,
        ("{% if m.content is none %}{{ 'x' + c.function.arguments }}{% endif %}",) * 2,
        ("{% if m.content %}{{ c.function.arguments | tojson }}{% endif %}", ""),
        ("{{ c.function.nothing }}", ""),
    ],
)
def test_calls_have_the_form_that_the_template_writes(call, written):
    if written == call:  # only a message whose content is null
        written = "x" * ("'x'" in call) + '{"city": "Köln"}'
    function = {"name": "f", "arguments": '{"city":"K\\u00f6ln"}'}
    for content in (None, ""):
        message = {"role": "assistant", "content": content, "tool_calls": [{"function": function}]}
        assert render(CALLS.replace("CALL", call), USER, message) == written


REFUSING = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{{ raise_exception('both') if m.content and m.thinking }}"
    "[{{ m.content or m.thinking }}]{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("texts", "written"),
    [
        ({"content": "a", "reasoning_content": "b"}, "[b\na]"),
        ({"content": "a"}, "[a]"),
        ({"reasoning_content": "b"}, "[b]"),
        ({}, "[]"),
    ],
)
def test_text_beside_calls_is_reasoning_if_a_template_refuses_both(texts, written):
    call = {"function": {"name": "f", "arguments": {"k": 1}}}
    message = {"role": "assistant", "tool_calls": [call], **texts}
    assert render(REFUSING, USER, message) == written + '{"k": 1}'


def test_rendering_changes_no_message():
    conversation = conversation_of([USER], **CONTINUED)
    template = ChatTemplate(source_of(default="{{ messages[0].content }}!"))
    assert [template.render(conversation) for _ in range(2)] == ["Hi", "Hi"]


@pytest.mark.parametrize(
    ("text", "message", "reason"),
    [
        ("{{ messages[0].role }}", USER, "reads no content"),
        ("{{ messages[0].content[:2] }}", USER, "leaves out or changes"),
        ("{{ messages[0].content | upper }}", USER, "leaves out or changes"),
        (LOOP_OVER_PARTS, {"role": "assistant"}, "has no text"),
    ],
)
def test_a_final_message_that_cannot_be_continued_is_refused(text, message, reason):
    refused(f"continue_final_message is true, but .*{reason}", text, message, **CONTINUED)


def test_a_continued_message_excludes_a_generation_prompt():
    refused(
        "add_generation_prompt are both true",
        "",
        continue_final_message=True,
        add_generation_prompt=True,
    )


def test_a_chat_without_messages_is_refused():
    with pytest.raises(InvalidArgumentError, match="messages is empty"):
        ChatTemplate(source_of(default="")).render(Conversation(messages=()))


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"template_kwargs": {"x": ["\ud800"]}}, r"chat_template_kwargs\.x\[0\]"),
        ({"template_kwargs": {"\ud800": 1}}, r"chat_template_kwargs\.\?"),
        ({"documents": [{"text": "a\udfff"}]}, r"documents\[0\]\.text"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"\ud800": {}}}}]},
            r"tools\[0\]\.function\.parameters\.\?",
        ),
    ],
)
def test_lone_surrogates_are_refused_by_name(arguments, place):
    refused(f"^{place} is not valid Unicode: lone surrogate at character", "", **arguments)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user", "content": "ab\ud800"}, r"messages\[1\]\.content"),
        ({"role": "user", "content": ["\ud800"]}, r"messages\[1\]\.content\[0\]\.text"),
        ({"role": "user", "content": "", "extra": "\ud800"}, r"messages\[1\]\.extra"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}],
            },
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments\.x",
        ),
    ],
)
def test_lone_surrogates_of_messages_are_refused_by_name(message, place):
    refused(f"^{place} is not valid Unicode", "", USER, message)


def nested(depth):
    value = "x"
    for _ in range(depth):
        value = {"a": [value]}
    return value


def test_deep_data_is_refused():
    refused(r"chat_template_kwargs.*nests too deeply", "", template_kwargs=nested(40))
    refused(r"messages\[0\]\.x.*nests too deeply", "", USER | {"x": nested(3000)})
    deep = nested(31)
    assert render("{{ a | tojson }}", template_kwargs=deep).count("a") == 30


def test_long_keys_make_short_errors():
    refused("nests too deeply", "", USER | {"k" * 100_000: nested(40)})
    refused("lone surrogate", "", template_kwargs={"k" * 100_000: ["a"] * 100_000 + ["\ud800"]})


def test_other_data_than_json_is_refused():
    refused("chat_template_kwargs.x must be JSON data, not set", "", template_kwargs={"x": {1}})
    refused("keys must be texts", "", template_kwargs={"x": {1: 2}})


def test_templates_see_plain_types_only():
    class Word(str):
        def shout(self):
            return "never"

    class Level(enum.IntEnum):
        LOW = 1

    kwargs = {"word": Word("w"), "level": Level.LOW}
    assert render("{{ word }}{{ level }}{{ word.shout is defined }}", template_kwargs=kwargs) == (
        "w1False"
    )


def test_a_prompt_that_is_too_long_is_refused():
    text = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    message = {"role": "user", "content": "x" * 100_000}  # 100 MB, if it were rendered
    refused(f"more than {MAX_PROMPT_CHARS} characters", text, message)
    assert len(render("{{ messages[0].content }}", message)) == 100_000


def test_a_template_renders_in_several_threads():
    template = ChatTemplate(source_of(default=FAMILIES["qwen3"]))
    chats = [conversation_of([{"role": "user", "content": f"chat {i}"}]) for i in range(8)]
    prompts = {}

    def run(i):
        prompts[i] = [template.render(chats[i]) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(set(prompts[i]) == {template.render(chats[i])} for i in range(8))


@pytest.mark.parametrize(
    ("prompt", "prefill", "expected"),
    [
        ("<assistant><think>\n", "", True),
        ("<assistant><think>", "", True),
        ("<assistant>", "", False),
        ("<assistant><think>\n\n</think>\n\n", "", False),
        ("<user>What is <think>?</s><assistant>", "", False),
        ("<assistant><think>\nSo I", "So I", True),
        ("<assistant><think>\nSo I", "<think>\nSo I", True),
        ("<assistant><think>\nSo</think> I", "So</think> I", False),
        ("<assistant><think>\n\n</think>\n\nSo ", "So ", False),
        ("<assistant>So", "So ", False),
        ("<assistant><think>\nSo I", "", False),
    ],
)
def test_whether_a_prompt_ends_in_reasoning(prompt, prefill, expected):
    assert ends_in_reasoning(prompt, "<think>", "</think>", prefill) is expected
