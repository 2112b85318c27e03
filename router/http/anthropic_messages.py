"""The `system` and `messages` of Anthropic's API as messages of OpenAI's chat API."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import compact_json
from router.http.anthropic_blocks import (
    SERVER_RESULTS,
    SERVER_USES,
    TEXT_BLOCKS,
    text_of_block,
    text_of_blocks,
    text_of_server_result,
    text_of_server_use,
    wrong_kind,
)
from router.http.fields import Fields
from router.http.message_builder import MessageBuilder

__all__ = ["continues_answer", "messages_of_turns"]

_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
"""A line that Claude Code puts before the system prompt. It changes with each request and says
nothing to a model, but would keep the prompts of a session from sharing their KV.
"""
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
    if text := _system_text(system):
        builder.add("system", text)
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


def _system_text(system: str | list[dict[str, Any]] | None) -> str:
    """The text of the system prompt, without the line about billing."""
    body = Fields({"system": system})
    if not isinstance(system, list):
        return _BILLING.sub("", body.text("system") or "", count=1)
    texts = []
    for block in body.objects("system"):
        text = text_of_block(block)
        if not _BILLING.fullmatch(text):
            texts.append(_BILLING.sub("", text, count=1))
    return "\n".join(texts)


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
            raise wrong_kind(block, kind, f"one of {', '.join(adders)} in a message of {role}")
        adders[kind](builder, block)


def _add_user_text(builder: MessageBuilder, block: Fields) -> None:
    builder.add("user", TEXT_BLOCKS[block.required_text("type")](block))


def _add_system_text(builder: MessageBuilder, block: Fields) -> None:
    builder.add("system", block.required_text("text"))


def _add_answer_text(builder: MessageBuilder, block: Fields) -> None:
    builder.add_answer(block.required_text("text"))


def _add_thinking(builder: MessageBuilder, block: Fields) -> None:
    if thinking := block.required_text("thinking"):
        builder.add_reasoning(thinking)


def _skip(builder: MessageBuilder, block: Fields) -> None:
    """Redacted thinking has no text; other blocks say how an answer was made."""


def _add_server_use(builder: MessageBuilder, block: Fields) -> None:
    builder.add_answer(text_of_server_use(block))


def _add_server_result(builder: MessageBuilder, block: Fields) -> None:
    builder.add_answer(text_of_server_result(block))


def _add_compaction(builder: MessageBuilder, block: Fields) -> None:
    """A summary of the messages before it; one that is encrypted alone cannot be read."""
    builder.add("user", block.required_text("content"))


def _add_tool_use(builder: MessageBuilder, block: Fields) -> None:
    arguments = block.required("input")
    text = compact_json(block.path_of("input"), arguments) if arguments else json.dumps({})
    builder.add_call(block.required_text("id"), block.required_text("name"), text)


def _add_tool_result(builder: MessageBuilder, block: Fields) -> None:
    text = "" if block.get("content") is None else text_of_blocks(block, "content")
    if not text and block.boolean("is_error"):
        text = "error"
    builder.add_tool_result(block.required_text("tool_use_id"), text)


_BLOCKS: Mapping[str, _Adders] = {
    "user": {
        **dict.fromkeys(TEXT_BLOCKS, _add_user_text),
        "tool_result": _add_tool_result,
        "compaction": _add_compaction,
    },
    "assistant": {
        "text": _add_answer_text,
        "tool_use": _add_tool_use,
        "thinking": _add_thinking,
        "redacted_thinking": _skip,
        **dict.fromkeys(SERVER_USES, _add_server_use),
        **dict.fromkeys(SERVER_RESULTS, _add_server_result),
        "compaction": _add_compaction,
        "fallback": _skip,
        "mcp_tool_listing": _skip,
    },
    "system": {"text": _add_system_text},
}
"""What adds a block to a conversation, by the message's role and the block's type."""
