"""Checks the messages and tools of OpenAI's chat API and brings them into one form.

The result is a `Conversation`, from which a `ChatTemplate` renders a prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_values import array_at, is_array, object_at, text_at
from baton.common.short_texts import short_repr
from router.chat.chat_request import Conversation
from router.requests.json_input import InvalidJsonError, JsonBudget, parse_json

__all__ = [
    "MAX_ALL_PARTS",
    "MAX_MESSAGES",
    "MAX_PARTS",
    "MAX_TOOLS",
    "conversation_of",
]

MAX_MESSAGES = 4096
"""The most messages of a chat."""
MAX_PARTS = 4096
"""The most parts of a message's content, and the most tool calls of a message."""
MAX_ALL_PARTS = 2**15
"""The most parts and tool calls of all messages of a chat together."""
MAX_TOOLS = 1024
"""The most tools and the most documents of a chat."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of text parts, with the field that has their text."""
_TEXT_OR_NULL = ("name", "tool_call_id", "reasoning_content", "reasoning")


def conversation_of(
    messages: Any,
    *,
    tools: Any = None,
    documents: Any = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    template_kwargs: Any = None,
) -> Conversation:
    """Returns a checked chat.

    Content is a text, None or a list of text parts afterwards, and the arguments of tool calls are
    objects. Unknown fields of messages stay, for templates that read them.

    Args:
        messages: OpenAI's messages.
        tools: OpenAI's tools; None: none.
        documents: objects for templates that read documents; None: none.
        add_generation_prompt: the prompt ends with the start of an answer; None: it does unless
            `continue_final_message` is true.
        continue_final_message: the answer continues the text of the last message.
        template_kwargs: further variables of the template (`chat_template_kwargs`); None: none.

    Raises:
        InvalidArgumentError: a field has a wrong type, role or number of elements, or is no text;
            names it by its path, such as `messages[2].content[0].type`.
    """
    budget = JsonBudget()
    _check_number_of_parts(array_at("messages", messages, MAX_MESSAGES))
    checked = tuple(
        _message(f"messages[{i}]", message, budget) for i, message in enumerate(messages)
    )
    if not checked:
        raise InvalidArgumentError("messages is empty; a chat has at least one message")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return Conversation(
        messages=checked,
        tools=tuple(
            _tool(f"tools[{i}]", tool)
            for i, tool in enumerate(array_at("tools", _or(tools, ()), MAX_TOOLS))
        ),
        documents=tuple(
            object_at(f"documents[{i}]", document)
            for i, document in enumerate(array_at("documents", _or(documents, ()), MAX_TOOLS))
        ),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=object_at("chat_template_kwargs", _or(template_kwargs, {})),
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_number_of_parts(messages: Sequence[Any]) -> None:
    objects = [message for message in messages if isinstance(message, Mapping)]
    arrays = [m.get(name) for m in objects for name in ("content", "tool_calls")]
    num_parts = sum(len(array) for array in arrays if isinstance(array, list | tuple))
    if num_parts > MAX_ALL_PARTS:
        limit = f"at most {MAX_ALL_PARTS} are allowed"
        raise InvalidArgumentError(f"messages has {num_parts} parts and tool calls; {limit}")


def _message(path: str, message: Any, budget: JsonBudget) -> Mapping[str, Any]:
    fields = {name: value for name, value in object_at(path, message).items() if value is not None}
    role = text_at(f"{path}.role", fields.get("role"))
    if role not in _ROLES:
        raise InvalidArgumentError.for_field(f"{path}.role", role, f"one of {', '.join(_ROLES)}")
    for name in _TEXT_OR_NULL:
        if name in fields:
            text_at(f"{path}.{name}", fields[name])
    if "content" in fields:
        fields["content"] = _content(f"{path}.content", fields["content"])
    if role == "assistant":
        calls = _tool_calls(f"{path}.tool_calls", fields.pop("tool_calls", ()), budget)
        fields |= {"tool_calls": calls} if calls else {}
        fields |= _reasoning(fields)
    return fields


def _reasoning(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The reasoning of an earlier answer, under both names that clients and templates use."""
    reasoning = fields.get("reasoning") or fields.get("reasoning_content")
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def _content(path: str, content: Any) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not is_array(content):
        text_at(path, content, "a text or an array of parts")
    parts = enumerate(array_at(path, content, MAX_PARTS))
    return [{"type": "text", "text": _part_text(f"{path}[{i}]", part)} for i, part in parts]


def _part_text(path: str, part: Any) -> str:
    if isinstance(part, str):  # some clients write a part of text so, and vLLM takes it
        return part
    fields = object_at(path, part)
    kind = text_at(f"{path}.type", fields.get("type"))
    if kind not in _TEXT_FIELDS:
        raise InvalidArgumentError(f"{path}.type is {short_repr(kind)}; Baton serves text only")
    name = _TEXT_FIELDS[kind]
    return text_at(f"{path}.{name}", fields.get(name))


def _tool_calls(path: str, calls: Any, budget: JsonBudget) -> list[dict[str, Any]]:
    return [
        _tool_call(f"{path}[{i}]", call, budget)
        for i, call in enumerate(array_at(path, calls, MAX_PARTS))
    ]


def _tool_call(path: str, call: Any, budget: JsonBudget) -> dict[str, Any]:
    fields = dict(object_at(path, call))
    _function_type(path, fields)
    function = dict(object_at(f"{path}.function", fields.get("function")))
    text_at(f"{path}.function.name", function.get("name"))
    function["arguments"] = _arguments(
        f"{path}.function.arguments", function.get("arguments"), budget
    )
    return {**fields, "type": "function", "function": function}


def _arguments(path: str, arguments: Any, budget: JsonBudget) -> dict[str, Any]:
    """The arguments of a call as an object; templates write them in a format of their own.

    A text that is no JSON object stands for no arguments, as in vLLM: a model wrote it in an
    earlier answer, perhaps cut short, and the client sends it again with each further message.
    """
    if isinstance(arguments, str):
        try:
            arguments = parse_json(path, arguments, budget)
        except InvalidJsonError:
            return {}
        return arguments if isinstance(arguments, dict) else {}
    return dict(object_at(path, arguments or {}))


def _tool(path: str, tool: Any) -> Mapping[str, Any]:
    fields = object_at(path, tool)
    _function_type(path, fields)
    function = object_at(f"{path}.function", fields.get("function"))
    if not text_at(f"{path}.function.name", function.get("name")):
        raise InvalidArgumentError(f"{path}.function.name is empty")
    if function.get("parameters") is not None:
        object_at(f"{path}.function.parameters", function["parameters"])
    return fields


def _function_type(path: str, fields: Mapping[str, Any]) -> None:
    kind = fields.get("type", "function")
    if kind != "function":
        raise InvalidArgumentError.for_field(f"{path}.type", kind, "'function'")
