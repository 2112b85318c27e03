"""Any JSON as a body of the Responses or the Messages API is read, or refused as a wrong field."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.common.errors import InvalidArgumentError
from router.http.anthropic_request import MessagesBody, read_messages_request
from router.http.responses_request import ResponsesBody, read_responses_request

WORDS = (
    *("message", "user", "assistant", "system", "function_call", "function_call_output"),
    *("reasoning", "input_text", "output_text", "text", "tool_use", "tool_result", "thinking"),
    *("function", "allowed_tools", "auto", "any", "tool", "json_schema", "enabled", "f", "\ud800"),
)
NAMES = (
    *("type", "role", "content", "text", "name", "arguments", "call_id", "id", "input", "output"),
    *("thinking", "tool_use_id", "summary", "parameters", "input_schema", "format", "schema"),
    *("effort", "budget_tokens", "tools", "mode", "\ud800"),
)
LEAVES = st.one_of(
    st.sampled_from(WORDS),
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.floats(),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    ),
    max_leaves=12,
)


def bodies(model):
    return st.dictionaries(st.sampled_from(sorted(model.model_fields)), JSON, max_size=6)


def items(**required):
    return st.lists(
        st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5).map(lambda d: {**required, **d}),
        max_size=3,
    )


@settings(deadline=None)
@given(bodies(ResponsesBody), JSON | items(role="user"))
def test_any_responses_body_is_read_or_refused(body, given_input):
    with suppress(InvalidArgumentError, ValidationError):
        read_responses_request(ResponsesBody.model_validate({**body, "input": given_input}))


@settings(deadline=None)
@given(bodies(MessagesBody), JSON | items(role="user"))
def test_any_messages_body_is_read_or_refused(body, messages):
    with suppress(InvalidArgumentError, ValidationError):
        read_messages_request(
            MessagesBody.model_validate({**body, "max_tokens": 8, "messages": messages})
        )
