"""The `system` and `messages` of Anthropic's API as messages of OpenAI's chat API."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from baton.errors import InvalidArgumentError
from baton.json_text import compact_json
from router.http.fields import Fields, wrong_value
from router.http.message_builder import MessageBuilder

__all__ = ["continues_answer", "messages_of_turns"]

_Adders = Mapping[str, Callable[[MessageBuilder, Fields], None]]


def messages_of_turns(
    system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Returns the messages of a body. An empty last message of the assistant is left out.

    Args:
        system: the body's.
        messages: the body's.

    Raises:
        InvalidArgumentError: a message or block is malformed or of a kind that Baton lacks;
            names its path.
    """
    builder = MessageBuilder(joins_users=True)
    if system:
        builder.add("system", _text_of(Fields({"system": system}), "system"))
    for i, given in enumerate(messages):
        message = Fields(given, f"messages[{i}]")
        message.required("role")
        role = message.choice("role", tuple(_BLOCKS))
        is_empty = message.get("content") in ("", [])
        if role == "assistant" and is_empty and i == len(messages) - 1:
            continue
        _add_blocks(builder, role or "", message)
    if not builder.messages:
        raise InvalidArgumentError("messages is empty; it must have at least 1 message")
    return builder.messages


def continues_answer(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer continues the last message, which then is the assistant's.

    Raises:
        InvalidArgumentError: that message ends with a call of a tool.
    """
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "assistant" or not content:
        return False
    if isinstance(content, list) and content[-1].get("type") == "tool_use":
        path = f"messages[{len(messages) - 1}]"
        raise InvalidArgumentError(f"{path} ends with tool_use; a tool_result must follow it")
    return True


def _add_blocks(builder: MessageBuilder, role: str, message: Fields) -> None:
    adders = _BLOCKS[role]
    if isinstance(message.required("content"), str):
        text = {"type": "text", "text": message.required_text("content")}
        adders["text"](builder, Fields(text, message.path_of("content")))
        return
    for block in message.objects("content"):
        kind = block.required_text("type")
        if kind not in adders:
            raise _wrong_kind(block, kind, f"one of {', '.join(adders)} in a message of {role}")
        adders[kind](builder, block)


def _add_user_text(builder: MessageBuilder, block: Fields) -> None:
    builder.add("user", block.required_text("text"))


def _add_system_text(builder: MessageBuilder, block: Fields) -> None:
    builder.add("system", block.required_text("text"))


def _add_answer_text(builder: MessageBuilder, block: Fields) -> None:
    builder.add_answer(block.required_text("text"))


def _add_thinking(builder: MessageBuilder, block: Fields) -> None:
    if thinking := block.required_text("thinking"):
        builder.add_reasoning(thinking)


def _skip(builder: MessageBuilder, block: Fields) -> None:
    """Redacted thinking has no text."""


def _add_tool_use(builder: MessageBuilder, block: Fields) -> None:
    arguments = block.required("input")
    text = compact_json(block.path_of("input"), arguments) if arguments else json.dumps({})
    builder.add_call(block.required_text("id"), block.required_text("name"), text)


def _add_tool_result(builder: MessageBuilder, block: Fields) -> None:
    text = "" if block.get("content") is None else _text_of(block, "content")
    builder.add_tool_result(block.required_text("tool_use_id"), text)


def _text_of(fields: Fields, name: str) -> str:
    """Returns the text of a field that is a text or an array of text blocks."""
    if isinstance(fields.get(name), str):
        return fields.required_text(name)
    texts = []
    for block in fields.objects(name):
        kind = block.required_text("type")
        if kind != "text":
            raise _wrong_kind(block, kind, "'text'")
        texts.append(block.required_text("text"))
    return "\n".join(texts)


def _wrong_kind(block: Fields, kind: str, limit: str) -> InvalidArgumentError:
    if kind in ("image", "document"):
        limit = "of text: Baton's models read and write text"
    return wrong_value(block.path_of("type"), kind, limit)


_BLOCKS: Mapping[str, _Adders] = {
    "user": {"text": _add_user_text, "tool_result": _add_tool_result},
    "assistant": {
        "text": _add_answer_text,
        "tool_use": _add_tool_use,
        "thinking": _add_thinking,
        "redacted_thinking": _skip,
    },
    "system": {"text": _add_system_text},
}
"""What adds a block to a conversation, by the message's role and the block's type."""
