"""`MessageBuilder`: collects a conversation's turns as messages of OpenAI's chat API."""

from collections.abc import Mapping
from itertools import dropwhile
from typing import Any

__all__ = ["MessageBuilder"]


class MessageBuilder:
    """Makes messages. All that the assistant does between two other messages is one message:
    templates write a turn with reasoning, then text, then tool calls, in no other order.

    Args:
        joins_users: whether consecutive user messages are one message, as in Anthropic's API.
    """

    def __init__(self, joins_users: bool = False) -> None:
        self._messages: list[dict[str, Any]] = []
        self._joins_users = joins_users

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The messages so far."""
        return tuple(
            {name: str(value) if isinstance(value, _Text) else value for name, value in m.items()}
            for m in self._messages
        )

    @property
    def ends_with_assistant(self) -> bool:
        """Whether the last message is the assistant's."""
        return bool(self._messages) and self._messages[-1]["role"] == "assistant"

    def add(self, role: str, text: str) -> None:
        """Adds text of the system, a developer or a user."""
        is_joined = self._joins_users and role == "user" and bool(self._messages)
        if is_joined and self._messages[-1]["role"] == "user":
            self._append(self._messages[-1], "content", text)
        else:
            self._messages.append({"role": role, "content": _Text([text])})

    def add_tool_result(self, call_id: str, text: str) -> None:
        """Adds the result of a tool call."""
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def add_answer(self, text: str) -> None:
        """Adds text of the assistant."""
        self._append(self._assistant(), "content", text)

    def add_reasoning(self, text: str) -> None:
        """Adds reasoning of the assistant."""
        self._append(self._assistant(), "reasoning_content", text)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Adds a tool call. `arguments`: their JSON text."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self) -> dict[str, Any]:
        if not self.ends_with_assistant:
            self._messages.append({"role": "assistant", "content": None})
        return self._messages[-1]

    @staticmethod
    def _append(message: dict[str, Any], name: str, text: str) -> None:
        before = message.get(name)
        if before is None:
            before = message[name] = _Text()
        before.append(text)


class _Text(list[str]):
    """The pieces of a text, one a line. They are joined once: a text of many pieces would
    otherwise be copied for each of them.
    """

    def __str__(self) -> str:
        return "\n".join(dropwhile(lambda piece: not piece, self))
