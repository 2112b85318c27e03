"""Every field that the official clients can send: supported, refused by name, or known to change
no answer. A field of a newer client fails here until it is decided.
"""

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from baton.common.errors import InvalidArgumentError
from router.http.anthropic_request import (
    MessagesBody,
    counted_conversation,
    read_messages_request,
)
from router.http.bodies import SamplingBody
from router.http.errors import anthropic_error, problem_of
from router.http.openai_bodies import ChatBody, CompletionBody
from router.http.responses_request import ResponsesBody, read_responses_request

USER = {"role": "user", "content": "Hi"}
SUPPORTED = "supported"
HEADER = "sent as a header"


def refused(value: Any, *neutral: Any) -> SimpleNamespace:
    """A field that changes the answer if it has a value, and nothing with neutral ones."""
    return SimpleNamespace(value=value, neutral=(None, *neutral))


def ignored(*values: Any) -> SimpleNamespace:
    """A field that changes no answer."""
    return SimpleNamespace(value=None, neutral=(None, *values))


CHAT: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *("frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens"),
            *("max_tokens", "messages", "model", "n", "parallel_tool_calls", "prediction"),
            *("presence_penalty", "reasoning_effort", "response_format", "seed", "stop"),
            *("stream", "stream_options", "temperature", "tool_choice", "tools"),
            *("top_logprobs", "top_p"),
        ),
        SUPPORTED,
    ),
    "audio": refused({"voice": "alloy", "format": "wav"}),
    "function_call": refused({"name": "f"}, "none", "auto"),
    "functions": refused([{"name": "f"}], []),
    "modalities": refused(["text", "audio"], ["text"]),
    "moderation": refused({"model": "omni-moderation-latest"}),
    "web_search_options": refused({}),
    "prompt_cache_options": refused({"prewarm": True}, {"mode": "explicit", "ttl": "30m"}),
    "metadata": ignored({"a": "b"}),
    "prompt_cache_key": ignored("k"),
    "prompt_cache_retention": ignored("24h"),
    "safety_identifier": ignored("s"),
    "service_tier": ignored("auto", "flex"),
    "store": ignored(True, False),
    "user": ignored("u"),
    "verbosity": ignored("low"),
}
COMPLETION: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *("best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens"),
            *("model", "n", "presence_penalty", "prompt", "seed", "stop", "stream"),
            *("stream_options", "temperature", "top_p"),
        ),
        SUPPORTED,
    ),
    "suffix": refused("x", ""),
    "user": ignored("u"),
}
STORED = {
    "conversation": refused("conv_1"),
    "previous_response_id": refused("resp_1"),
}
RESPONSES: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *("include", "input", "instructions", "max_output_tokens", "model"),
            *("parallel_tool_calls", "reasoning", "stream", "stream_options", "temperature"),
            *("text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation"),
        ),
        SUPPORTED,
    ),
    **STORED,
    "background": refused(True, False),
    "context_management": refused([{"type": "compaction"}], []),
    "moderation": refused({"model": "omni-moderation-latest"}),
    "prompt": refused({"id": "p"}),
    "prompt_cache_options": refused({"prewarm": True}, {"ttl": "30m"}),
    "access_programs": ignored({"cyber": "standard"}),
    "background_options": ignored({"completion_window": "soonest"}),
    "image": ignored({"context_compression": "auto"}),
    "max_tool_calls": ignored(3),
    "metadata": ignored({"a": "b"}),
    "prompt_cache_key": ignored("k"),
    "prompt_cache_retention": ignored("24h"),
    "safety_identifier": ignored("s"),
    "service_tier": ignored("auto"),
    "store": ignored(True, False),
    "user": ignored("u"),
}
COUNTED_RESPONSES: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *("input", "instructions", "model", "parallel_tool_calls", "reasoning", "text"),
            *("tool_choice", "tools", "truncation"),
        ),
        SUPPORTED,
    ),
    **STORED,
    "personality": refused("friendly", ""),
}
COUNTED_MESSAGES: Mapping[str, Any] = {
    **dict.fromkeys(
        ("messages", "model", "output_config", "system", "thinking", "tool_choice", "tools"),
        SUPPORTED,
    ),
    "cache_control": ignored({"type": "ephemeral"}),
    "speed": ignored("fast", "standard"),
    "user_profile_id": HEADER,
    "workspace_id": HEADER,
}
COUNTED_BETA_MESSAGES: Mapping[str, Any] = {
    **COUNTED_MESSAGES,
    "betas": HEADER,
    "billing_policy": ignored({"type": "billing_policy", "bill_to": "self"}),
    "compaction": refused({"type": "summarize"}, {}),
    "context_management": refused(
        {"edits": [{"type": "clear_tool_uses_20250919"}]},
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "mcp_servers": refused([{"type": "url", "url": "u", "name": "m"}], []),
}
MESSAGES: Mapping[str, Any] = {
    **COUNTED_MESSAGES,
    **dict.fromkeys(("max_tokens", "stop_sequences", "stream"), SUPPORTED),
    "container": refused("c"),
    "diagnostics": ignored({"previous_message_id": "m"}),
    "inference_geo": refused("eu", "global"),
    "metadata": ignored({"user_id": "u"}),
    "service_tier": ignored("auto"),
}
BETA_MESSAGES: Mapping[str, Any] = {
    **MESSAGES,
    **COUNTED_BETA_MESSAGES,
    "fallback_credit_token": ignored("t"),
    "fallbacks": refused([{"model": "m"}], [], "default"),
    "thread": refused({"type": "create"}),
}


def read_chat(body: dict[str, Any]) -> None:
    chat = ChatBody.model_validate(body)
    chat.conversation()
    chat.stated()


def read_completion(body: dict[str, Any]) -> None:
    CompletionBody.model_validate(body).stated()


def read_response(body: dict[str, Any]) -> None:
    read_responses_request(ResponsesBody.model_validate(body))


def read_message(body: dict[str, Any]) -> None:
    read_messages_request(MessagesBody.model_validate(body))


def read_counted_message(body: dict[str, Any]) -> None:
    counted_conversation(MessagesBody.model_validate(body))


Api = tuple[Mapping[str, Any], type, type[SamplingBody], Callable[[dict[str, Any]], None], Any]
_MESSAGES = {"messages": [USER], "max_tokens": 8}
APIS: list[Api] = [
    (
        CHAT,
        chat_create_params.CompletionCreateParamsStreaming,
        ChatBody,
        read_chat,
        {"messages": [USER]},
    ),
    (
        COMPLETION,
        completion_create_params.CompletionCreateParamsStreaming,
        CompletionBody,
        read_completion,
        {"prompt": "a"},
    ),
    (
        RESPONSES,
        response_create_params.ResponseCreateParamsStreaming,
        ResponsesBody,
        read_response,
        {"input": "a"},
    ),
    (
        COUNTED_RESPONSES,
        input_token_count_params.InputTokenCountParams,
        ResponsesBody,
        read_response,
        {"input": "a"},
    ),
    (
        MESSAGES,
        message_create_params.MessageCreateParamsStreaming,
        MessagesBody,
        read_message,
        _MESSAGES,
    ),
    (
        BETA_MESSAGES,
        beta_create_params.MessageCreateParamsStreaming,
        MessagesBody,
        read_message,
        _MESSAGES,
    ),
    (
        COUNTED_MESSAGES,
        message_count_tokens_params.MessageCountTokensParams,
        MessagesBody,
        read_counted_message,
        {"messages": [USER]},
    ),
    (
        COUNTED_BETA_MESSAGES,
        beta_count_params.MessageCountTokensParams,
        MessagesBody,
        read_counted_message,
        {"messages": [USER]},
    ),
]


@pytest.mark.parametrize(("decisions", "params", "body"), [api[:3] for api in APIS])
def test_each_field_of_a_client_is_decided(decisions, params, body):
    assert set(decisions) == set(get_type_hints(params))
    supported = {name for name, decision in decisions.items() if decision is SUPPORTED}
    assert supported <= set(body.model_fields)


@pytest.mark.parametrize(
    ("read", "required", "name", "decision"),
    [
        (read, required, name, decision)
        for decisions, _, _, read, required in APIS
        for name, decision in decisions.items()
        if isinstance(decision, SimpleNamespace)
    ],
)
def test_no_field_changes_its_meaning_silently(read, required, name, decision, caplog):
    caplog.set_level(logging.DEBUG, "baton.http")
    for value in decision.neutral:
        read({**required, name: value})
    if decision.value is None:
        assert not any(name in record.getMessage() for record in caplog.records)
    else:
        with pytest.raises(InvalidArgumentError, match=rf"^{name}\b") as caught:
            read({**required, name: decision.value})
        assert (problem_of(caught.value, "r").param or "").split(".")[0] == name


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_threads_are_refused_with_the_details_that_anthropics_client_knows(thread):
    with pytest.raises(InvalidArgumentError) as caught:
        read_message({**_MESSAGES, "thread": thread})
    error = anthropic_error(problem_of(caught.value, "r"))["error"]
    assert error["type"] == "invalid_request_error"
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert error["details"] == details


def test_the_older_name_of_a_form_is_enforced_too():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    body = MessagesBody.model_validate({**_MESSAGES, "output_format": form})
    assert read_messages_request(body).params["structured_outputs"].json == '{"type":"object"}'
    body = MessagesBody.model_validate(
        {**_MESSAGES, "output_format": form, "output_config": {"format": form}}
    )
    with pytest.raises(InvalidArgumentError, match=r"^output_format is set together with"):
        read_messages_request(body)
