"""The `input` of OpenAI's Responses API as messages of its chat API."""

from collections.abc import Callable, Mapping
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import compact_json
from router.http.fields import Fields
from router.http.json_bytes import text_json
from router.http.message_builder import MessageBuilder
from router.http.responses_tools import INPUT, model_name

__all__ = ["messages_of_input"]

_ROLES = ("user", "assistant", "system", "developer")
_UNSHOWN = ("type", "id", "status", "container_id")
"""Fields of a server's calls that say nothing to a model."""
_MAX_ITEM_BYTES = 2**24
_NOT_SUPPORTED = "it is not supported: Baton's models read and write text"
_NEEDS_STORE = "it is not supported: Baton stores no responses; send the item itself"


def messages_of_input(
    instructions: str | None, given: str | list[dict[str, Any]] | None
) -> tuple[Mapping[str, Any], ...]:
    """Returns the messages of a body.

    Args:
        instructions: of the body; they become the first message.
        given: the body's input; None: the prompt is the instructions alone.

    Raises:
        InvalidArgumentError: an item is malformed or of a type that Baton lacks; names its path.
    """
    builder = MessageBuilder()
    if instructions:
        builder.add("system", instructions)
    if given is None:
        if not instructions:
            raise InvalidArgumentError("input is missing, and so is instructions; set one of them")
    elif isinstance(given, str):
        builder.add("user", given)
    elif not given:
        raise InvalidArgumentError("input is empty; it must have at least 1 item")
    else:
        for i, item in enumerate(given):
            _add_item(builder, Fields(item, f"input[{i}]"))
    return builder.messages


def _add_item(builder: MessageBuilder, item: Fields) -> None:
    kind = item.text("type") or ("message" if "role" in item.raw else None)
    add = _ITEMS.get(kind or "")
    if add is None:
        limit = f"one of {', '.join(_ITEMS)}"
        if kind == "item_reference":
            limit += f"; {_NEEDS_STORE}"
        raise InvalidArgumentError.for_field(item.path_of("type"), kind, limit)
    add(builder, item)


def _add_message(builder: MessageBuilder, item: Fields) -> None:
    item.required("role")
    role = item.choice("role", _ROLES)
    if role == "assistant":
        builder.add_answer(_text_of(item, "content", ("output_text", "input_text", "refusal")))
    else:
        builder.add(role or "user", _text_of(item, "content", ("input_text",)))


def _add_call(builder: MessageBuilder, item: Fields) -> None:
    name = model_name(item.required_text("name"), item.text("namespace"))
    builder.add_call(item.required_text("call_id"), name, item.required_text("arguments"))


def _add_custom_call(builder: MessageBuilder, item: Fields) -> None:
    name = model_name(item.required_text("name"), item.text("namespace"))
    arguments = text_json({INPUT: item.required_text("input")})
    builder.add_call(item.required_text("call_id"), name, arguments)


def _add_hosted_call(builder: MessageBuilder, item: Fields) -> None:
    """A call that a server made within an earlier answer is text of that answer."""
    shown = {name: value for name, value in item.raw.items() if name not in _UNSHOWN}
    text = compact_json(item.path, shown, _MAX_ITEM_BYTES)
    builder.add_answer(f"[{item.required_text('type')} {text}]")


def _skip(builder: MessageBuilder, item: Fields) -> None:
    """Lists of tools on servers: the model is offered none of them."""


def _add_call_output(builder: MessageBuilder, item: Fields) -> None:
    builder.add_tool_result(
        item.required_text("call_id"), _text_of(item, "output", ("input_text", "output_text"))
    )


def _add_reasoning(builder: MessageBuilder, item: Fields) -> None:
    """Reasoning that is known by its encrypted form alone is left out."""
    parts = [part.required_text("text") for part in item.objects("content")]
    parts = parts or [part.required_text("text") for part in item.objects("summary")]
    if parts:
        builder.add_reasoning("\n".join(parts))


def _text_of(item: Fields, name: str, kinds: tuple[str, ...]) -> str:
    """Returns the text of a field that is a text or an array of parts.

    Raises:
        InvalidArgumentError: it is neither, or a part is of another type than `kinds`.
    """
    if isinstance(item.required(name), str):
        return item.required_text(name)
    return "\n".join(_text_of_part(part, kinds) for part in item.objects(name))


def _text_of_part(part: Fields, kinds: tuple[str, ...]) -> str:
    kind = part.required_text("type")
    if kind in ("input_image", "input_file", "input_audio"):
        raise InvalidArgumentError(f"{part.path_of('type')} is {kind!r}; {_NOT_SUPPORTED}")
    if kind not in kinds:
        raise InvalidArgumentError.for_field(
            part.path_of("type"), kind, f"one of {', '.join(kinds)}"
        )
    return part.required_text("refusal" if kind == "refusal" else "text")


_ITEMS: Mapping[str, Callable[[MessageBuilder, Fields], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_call_output,
    "custom_tool_call": _add_custom_call,
    "custom_tool_call_output": _add_call_output,
    "reasoning": _add_reasoning,
    "web_search_call": _add_hosted_call,
    "file_search_call": _add_hosted_call,
    "code_interpreter_call": _add_hosted_call,
    "mcp_call": _add_hosted_call,
    "mcp_list_tools": _skip,
    "tool_search_call": _skip,
    "tool_search_output": _skip,
}
