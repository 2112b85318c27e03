"""Random chats render as with `transformers`, and random data is rendered or refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.errors import InvalidArgumentError
from router.chat.messages import conversation_of
from router.chat.template import ChatTemplate
from tests.support.chat_cases import DOCUMENTS, FAMILIES, TOOLS, source_of
from tests.support.template_reference import prompts, tokenizer_with

PIECES = (
    "Hi",
    " ",
    "\n",
    "ü🦊",
    "<think>",
    "</think>",
    "</s>",
    "{{ x }}",
    "{% x %}",
    "'",
    '"',
    "\\",
)
TEXT = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALL = st.builds(
    lambda arguments: {
        "id": "123456789",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    },
    st.dictionaries(TEXT, JSON, max_size=3),
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(("system", "user")), "content": TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXT},
        optional={
            "tool_calls": st.lists(CALL, min_size=1, max_size=2),
            "reasoning_content": TEXT.filter(bool),
        },
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": TEXT, "tool_call_id": st.just("123456789")}
    ),
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.just(TOOLS),
        "documents": st.just(DOCUMENTS),
        "enable_thinking": st.booleans(),
        "date_string": TEXT,
    },
)
ENDS = st.sampled_from(
    (
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    )
)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_chats_render_as_in_transformers(family):
    template = ChatTemplate(source_of(default=FAMILIES[family]))
    tokenizer = tokenizer_with(FAMILIES[family])

    @settings(max_examples=20, deadline=None)
    @given(messages=st.lists(MESSAGE, min_size=1, max_size=5), arguments=ARGUMENTS, end=ENDS)
    def check(messages, arguments, end):
        ours, theirs = prompts(template, tokenizer, messages, arguments | end)
        assert ours == theirs

    check()


SURPRISE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ODD_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "tool"))},
    optional={
        "content": SURPRISE | st.lists(st.fixed_dictionaries({"type": st.just("text")})),
        "tool_calls": SURPRISE | st.lists(CALL),
        "name": SURPRISE,
        "reasoning": SURPRISE,
        "thinking": SURPRISE,
    },
)
TEMPLATES = [ChatTemplate(source_of(default=text)) for text in FAMILIES.values()]


@settings(max_examples=100, deadline=None)
@given(
    template=st.sampled_from(TEMPLATES),
    messages=SURPRISE | st.lists(ODD_MESSAGE, max_size=4),
    tools=SURPRISE | st.just(TOOLS),
    kwargs=SURPRISE,
    end=ENDS,
)
def test_whatever_a_client_sends_is_rendered_or_refused(template, messages, tools, kwargs, end):
    message = ""
    try:
        conversation = conversation_of(messages, tools=tools, template_kwargs=kwargs, **end)
        template.render(conversation).encode()
    except InvalidArgumentError as error:
        message = error.message
    message.encode()
    assert len(message) < 1500
