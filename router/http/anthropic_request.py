"""A body of Anthropic's messages API as a `ChatRequest`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import compact_json
from baton.common.request.sampling_params import MAX_STOPS
from baton.common.request.structured_outputs import StructuredOutputs
from router.chat.chat_request import ChatRequest, Conversation
from router.chat.messages import conversation_of
from router.http.anthropic_messages import continues_answer, messages_of_turns
from router.http.bodies import Array, JsonObject
from router.http.errors import ThreadUnsupportedError
from router.http.fields import Fields
from router.http.params import AnswerBody, sampling_of

__all__ = [
    "MessagesBody",
    "counted_conversation",
    "read_messages_request",
]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MAX_UINT32 = 2**32 - 1
_REFUSED = {
    "container": "Baton runs no code",
    "mcp_servers": "Baton calls no tools itself",
    "compaction": "Baton does not summarize conversations",
}
_NO_EDITS = "Baton edits no conversation; shorten the messages, or use a chat template that does"
_CLEAR_THINKING = "clear_thinking_20251015"
"""An edit that leaves out the thinking of earlier turns: the chat template decides on it."""
_ANYWHERE = "global"
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}


def _tools_of(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the tools of a body.

    Raises:
        InvalidArgumentError: a tool is malformed, or none of the client's own; names its path.
    """
    return [_tool(Fields(tool, f"tools[{i}]")) for i, tool in enumerate(tools or ())]


def _choice_of(
    given: Mapping[str, Any] | None, tools: list[dict[str, Any]]
) -> str | dict[str, Any] | None:
    """Returns the choice of a body; None if it states none.

    Args:
        given: the body's `tool_choice`.
        tools: what `_tools_of` returned.

    Raises:
        InvalidArgumentError: it is malformed, or names no tool; names its path.
    """
    if given is None:
        return None
    choice = Fields(given, "tool_choice")
    choice.required("type")
    kind = choice.choice("type", (*_CHOICES, "tool")) or ""
    if kind in ("any", "tool") and not tools:
        raise InvalidArgumentError(f"tool_choice.type is {kind!r}, but tools is empty")
    if kind != "tool":
        return _CHOICES[kind]
    name, names = choice.required_text("name"), [tool["function"]["name"] for tool in tools]
    if name not in names:
        limit = f"the name of one of tools: {', '.join(names)}"
        raise InvalidArgumentError.for_field("tool_choice.name", name, limit)
    return {"type": "function", "function": {"name": name}}


def _allows_parallel_calls(given: Mapping[str, Any] | None) -> bool:
    """Whether the answer may have several calls.

    Args:
        given: the body's `tool_choice`.
    """
    return not Fields(given or {}, "tool_choice").boolean("disable_parallel_tool_use")


def _tool(tool: Fields) -> dict[str, Any]:
    kind = tool.text("type")
    if kind not in (None, "custom"):
        limit = "'custom' or unset; Baton has no built-in tools"
        raise InvalidArgumentError.for_field(tool.path_of("type"), kind, limit)
    schema = tool.required("input_schema")
    compact_json(tool.path_of("input_schema"), schema)
    function = {"name": tool.required_text("name"), "parameters": schema}
    if description := tool.text("description"):
        function["description"] = description
    if (is_strict := tool.boolean("strict")) is not None:
        function["strict"] = is_strict
    return {"type": "function", "function": function}


class MessagesBody(AnswerBody):
    """A request for a message, or, without `max_tokens`, for the number of its tokens.

    Attributes:
        messages: the conversation. If the last message is the assistant's, the answer
            continues it.
        thinking: `budget_tokens` limits the reasoning of models whose tags are known.
        output_config: `format`: a JSON schema of the answer; `effort` is given to the template.
        output_format: the older name of `output_config.format`.
        metadata: ignored.
    """

    messages: Array[JsonObject]
    system: str | Array[JsonObject] | None = None
    stop_sequences: Array[str] | None = None
    tools: Array[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None
    output_config: JsonObject | None = None
    output_format: JsonObject | None = None
    metadata: JsonObject | None = None


def read_messages_request(
    body: MessagesBody, request_id: str = "", *, can_limit_thinking: bool = False
) -> ChatRequest:
    """Returns the chat that a body states.

    Args:
        body: the body.
        request_id: names the request.
        can_limit_thinking: whether the tags of the model's reasoning part are known.

    Raises:
        InvalidArgumentError: a field is malformed, or states a feature that Baton lacks; names
            its path.
    """
    if body.max_tokens is None:
        raise InvalidArgumentError("max_tokens is missing")
    if not 1 <= body.max_tokens <= _MAX_UINT32:
        raise InvalidArgumentError.for_field("max_tokens", body.max_tokens, "in [1, 2**32)")
    tools = _tools_of(body.tools)
    return ChatRequest(
        conversation=_conversation_of_body(body),
        params=_params(body, can_limit_thinking),
        tool_choice=_choice_of(body.tool_choice, tools),
        parallel_tool_calls=_allows_parallel_calls(body.tool_choice),
        schema_fields=[f"tools[{i}].input_schema" for i in range(len(tools))],
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


def _conversation_of_body(body: MessagesBody) -> Conversation:
    """Returns the conversation of a body.

    Raises:
        InvalidArgumentError: as of `read_messages_request`.
    """
    _refuse_meanings(Fields(body.model_extra or {}))
    messages = messages_of_turns(body.system, body.messages)
    return conversation_of(
        messages,
        tools=_tools_of(body.tools),
        documents=body.documents,
        continue_final_message=continues_answer(body.messages),
        template_kwargs=_template_kwargs(body),
    )


def _refuse_meanings(fields: Fields) -> None:
    """Refuses fields that would change the answer, or who computes it, in ways that Baton lacks.

    Raises:
        InvalidArgumentError: names the field.
    """
    if fields.get("thread") not in (None, False):
        raise ThreadUnsupportedError(
            "thread is not supported: Baton stores no conversations; send all messages"
        )
    fields.refuse(_REFUSED)
    management = fields.object("context_management")
    for edit in management.objects("edits") if management else ():
        if edit.required_text("type") != _CLEAR_THINKING:
            raise InvalidArgumentError.for_field(
                edit.path_of("type"), edit.get("type"), f"unset: {_NO_EDITS}"
            )
    if fields.get("fallbacks") not in (None, [], "default"):
        raise InvalidArgumentError.for_field(
            "fallbacks", fields.get("fallbacks"), "unset: Baton asks no other model"
        )
    if fields.get("inference_geo") not in (None, _ANYWHERE):
        limit = f"unset or {_ANYWHERE!r}: Baton does not know where its workers are"
        raise InvalidArgumentError.for_field("inference_geo", fields.get("inference_geo"), limit)


def counted_conversation(body: MessagesBody) -> Conversation:
    """Returns the conversation as a message's prompt has it: without tools if calls are forbidden.

    Raises:
        InvalidArgumentError: as of `read_messages_request`.
    """
    conversation = _conversation_of_body(body)
    choice = _choice_of(body.tool_choice, _tools_of(body.tools))
    return replace(conversation, tools=()) if choice == "none" else conversation


def _params(body: MessagesBody, can_limit_thinking: bool) -> dict[str, Any]:
    params = sampling_of(body)
    if body.stop_sequences:
        params["stop"] = _stops(body)
    thinking = Fields(body.thinking or {}, "thinking")
    budget = thinking.integer("budget_tokens", 1, _MAX_UINT32)
    if thinking.get("type") == "enabled" and budget is None:
        raise InvalidArgumentError("thinking.budget_tokens is missing")
    if budget is not None and can_limit_thinking:
        params.setdefault("thinking_token_budget", budget)
    outputs = _output_form(body)
    if outputs is not None:
        if "structured_outputs" in params:
            raise InvalidArgumentError(
                "output_config.format is set, and so is another form of the text; unset one"
            )
        params["structured_outputs"] = outputs
    return params


def _stops(body: MessagesBody) -> list[str]:
    further = [body.stop] if isinstance(body.stop, str) else body.stop or ()
    stops = [*(body.stop_sequences or ()), *further]
    if len(stops) > MAX_STOPS:
        raise InvalidArgumentError(
            f"stop_sequences has {len(stops)} entries; at most {MAX_STOPS} are allowed"
        )
    return stops


def _output_form(body: MessagesBody) -> StructuredOutputs | None:
    given = Fields(body.output_config or {}, "output_config").object("format")
    if body.output_format is not None:
        if given is not None:
            raise InvalidArgumentError(
                "output_format is set together with output_config.format; set one of them"
            )
        given = Fields(body.output_format, "output_format")
    if given is None:
        return None
    given.required("type")
    given.choice("type", ("json_schema",))
    return StructuredOutputs(json=compact_json(given.path_of("schema"), given.required("schema")))


def _template_kwargs(body: MessagesBody) -> dict[str, Any]:
    """Returns the variables of the template: whether the model thinks, and with which effort."""
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        thinking = Fields(body.thinking, "thinking")
        thinking.required("type")
        kwargs["enable_thinking"] = _THINKING[thinking.choice("type", tuple(_THINKING)) or ""]
    effort = Fields(body.output_config or {}, "output_config").text("effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    return kwargs | (body.chat_template_kwargs or {})
