"""A body of OpenAI's Responses API as a `ChatRequest`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import compact_json
from baton.common.request.structured_outputs import StructuredOutputs
from router.chat.chat_request import ChatRequest, Conversation
from router.chat.messages import conversation_of
from router.http.bodies import Array, FewEntries, Integer, JsonObject
from router.http.fields import Fields
from router.http.params import AnswerBody, sampling_of
from router.http.responses_input import messages_of_input
from router.http.responses_tools import ClientTool, Tools, tools_of

__all__ = [
    "CountedResponsesBody",
    "ResponsesBody",
    "ResponsesRequest",
    "counted_conversation",
    "read_responses_request",
]

_LOGPROBS = "message.output_text.logprobs"
_STATELESS = "Baton stores no responses; send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": "Baton stores no responses; leave it out, or stream",
    "prompt": "Baton has no stored prompts; send instructions and input",
    "context_management": "Baton does not compact conversations",
    "moderation": "Baton has no moderation models",
    "personality": "Baton's models have no styles of their own",
}
_NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})

_Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesBody(AnswerBody):
    """A request for a response.

    Attributes:
        input: a text, or items: messages, function calls, their outputs, reasoning.
        store: ignored: nothing is stored.
        text: `format`: text, json_object or json_schema.
        truncation: auto keeps the last tokens of a prompt that is too long.
    """

    input: str | Array[JsonObject]
    instructions: str | None = None
    max_output_tokens: Annotated[Integer | None, Field(ge=1, lt=2**32)] = None
    max_tool_calls: Annotated[Integer | None, Field(ge=0, lt=2**31)] = None
    top_logprobs: Annotated[Integer | None, Field(ge=0, le=20)] = None
    include: Array[_Include] | None = None
    tools: Array[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: JsonObject | None = None
    reasoning: JsonObject | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str] | None, FewEntries] = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CountedResponsesBody(ResponsesBody):
    """A request for the number of tokens of a prompt, which may be instructions alone."""

    input: str | Array[JsonObject] | None = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """A request for a response.

    Attributes:
        chat: the chat to answer.
        tools: what the model may call, by the names that it reads.
        includes_logprobs: whether the answer's text has log-probabilities.
        echo: fields of the answer that repeat the request.
    """

    chat: ChatRequest
    tools: Mapping[str, ClientTool] = field(default_factory=dict)
    includes_logprobs: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)


def read_responses_request(
    body: ResponsesBody, request_id: str = "", defaults: Mapping[str, Any] = _NO_DEFAULTS
) -> ResponsesRequest:
    """Returns the request that a body states.

    Args:
        body: the body.
        request_id: names the request.
        defaults: sampling parameters of the model, which the answer states if the body does not.

    Raises:
        InvalidArgumentError: a field is malformed, or states a feature that Baton lacks; names
            its path.
    """
    Fields(body.model_extra or {}).refuse(_REFUSED)
    tools = tools_of(body.tools, body.tool_choice, request_id)
    chat = ChatRequest(
        conversation=conversation_of(
            messages_of_input(body.instructions, body.input),
            tools=tools.tools,
            documents=body.documents,
            template_kwargs=_template_kwargs(body),
        ),
        params=_params(body),
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        schema_fields=tools.schema_fields,
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    return ResponsesRequest(
        chat=chat,
        tools=tools.by_name,
        includes_logprobs=_LOGPROBS in (body.include or ()),
        echo=_echo(body, tools, defaults),
    )


def counted_conversation(body: CountedResponsesBody, request_id: str = "") -> Conversation:
    """Returns the conversation as a response's prompt has it: without tools if calls are forbidden.

    Raises:
        InvalidArgumentError: as of `read_responses_request`.
    """
    chat = read_responses_request(body, request_id).chat
    return replace(chat.conversation, tools=()) if chat.tool_choice == "none" else chat.conversation


def _params(body: ResponsesBody) -> dict[str, Any]:
    params = sampling_of(body)
    if body.max_output_tokens is not None:
        params["max_tokens"] = body.max_output_tokens
    if _LOGPROBS in (body.include or ()):
        params["logprobs"] = body.top_logprobs or 0
    if body.truncation == "auto":
        params.setdefault("truncate_prompt_tokens", -1)
    outputs = None if body.text is None else _text_form(Fields(body.text, "text"))
    if outputs is not None:
        if "structured_outputs" in params:
            raise InvalidArgumentError(
                "text.format is set, and so is another form of the text; unset one"
            )
        params["structured_outputs"] = outputs
    return params


def _text_form(text: Fields) -> StructuredOutputs | None:
    """Returns the form that `text.format` states; None: any text."""
    given = text.object("format")
    if given is None:
        return None
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema":
            given.required_text("name")
            schema = compact_json(given.path_of("schema"), given.required("schema"))
            return StructuredOutputs(json=schema)
    limit = "one of text, json_object, json_schema"
    raise InvalidArgumentError.for_field(given.path_of("type"), given.get("type"), limit)


def _template_kwargs(body: ResponsesBody) -> dict[str, Any]:
    """Returns the variables of the template: `reasoning.effort` is given to templates as
    `reasoning_effort`, and "none" turns reasoning off where the template can.
    """
    kwargs: dict[str, Any] = {}
    effort = _reasoning(body)["effort"]
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    if effort == "none":
        kwargs["enable_thinking"] = False
    return kwargs | (body.chat_template_kwargs or {})


def _reasoning(body: ResponsesBody) -> dict[str, str | None]:
    reasoning = Fields(body.reasoning or {}, "reasoning")
    return {
        "effort": reasoning.text("effort"),
        "summary": reasoning.choice("summary", ("auto", "concise", "detailed")),
    }


def _echo(body: ResponsesBody, tools: Tools, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the answer that repeat the request, in the API's order."""
    text = {name: value for name, value in (body.text or {}).items() if value is not None}
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": _reasoning(body),
        "safety_identifier": body.safety_identifier,
        "temperature": defaults.get("temperature", 1.0)
        if body.temperature is None
        else body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": tools.echoed_choice,
        "tools": tools.echoed,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
