"""`ChatOutput`: from a candidate's text to reasoning, content and tool calls."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from baton.common.request.answer import ChatDelta, ToolCallDelta
from router.chat.reasoning_parsers import ReasoningParser
from router.chat.tool_parsers.base import ToolParser

__all__ = ["ChatAnswer", "ChatOutput", "ToolCall", "join_deltas", "whole_answer"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call. `arguments` is JSON, unless the model's text is malformed or cut short."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A whole answer. Its content is None if there is other output and no text."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


class ChatOutput:
    """Turns one candidate's text into deltas: reasoning first, then content and tool calls.

    Args:
        reasoning: finds the reasoning part; None: there is none.
        tools: finds tool calls behind the reasoning part; None: all of it is content.
        parallel_tool_calls: False: calls after the first one are left out.

    Attributes:
        has_tool_calls: whether a delta had a tool call.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        parallel_tool_calls: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel_tool_calls = parallel_tool_calls
        self.has_tool_calls = False
        self._last_arguments: list[str] = []

    @property
    def ends_in_calls(self) -> bool:
        """Whether there are tool calls, and nothing has cut the arguments of the last one."""
        return self.has_tool_calls and _is_json("".join(self._last_arguments))

    def push(self, text: str) -> ChatDelta:
        """Returns what further text adds to the answer. Text may be held back."""
        if self._reasoning is None:
            return self._find_calls(ChatDelta(content=text))
        return self._find_calls(self._reasoning.push(text))

    def finish(self) -> ChatDelta:
        """Returns what was held back. The text is complete; called once."""
        delta = ChatDelta() if self._reasoning is None else self._reasoning.finish()
        delta = self._find_calls(delta)
        if self._tools is None:
            return delta
        return join_deltas((delta, self._kept(self._tools.finish())))

    def _find_calls(self, delta: ChatDelta) -> ChatDelta:
        if self._tools is None or not delta.content:
            return delta
        return replace(self._kept(self._tools.push(delta.content)), reasoning=delta.reasoning)

    def _kept(self, delta: ChatDelta) -> ChatDelta:
        """Takes note of calls, and drops those that the request does not allow."""
        calls = delta.tool_calls
        if not self._parallel_tool_calls:
            calls = tuple([call for call in calls if call.index == 0])
        for call in calls:
            self.has_tool_calls = True
            if call.id is not None:
                self._last_arguments.clear()
            self._last_arguments.append(call.arguments)
        return replace(delta, tool_calls=calls)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def join_deltas(deltas: Iterable[ChatDelta]) -> ChatDelta:
    """Returns one delta with the text of several, one `ToolCallDelta` per call."""
    deltas = list(deltas)
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        for call in delta.tool_calls:
            calls.setdefault(call.index, []).append(call)
    return ChatDelta(
        content="".join([delta.content for delta in deltas]),
        reasoning="".join([delta.reasoning for delta in deltas]),
        tool_calls=tuple(
            [
                replace(parts[0], arguments="".join([part.arguments for part in parts]))
                for parts in calls.values()
            ]
        ),
    )


def whole_answer(deltas: Iterable[ChatDelta]) -> ChatAnswer:
    """Returns the answer that all deltas of a candidate make."""
    joined = join_deltas(deltas)
    has_other = bool(joined.reasoning or joined.tool_calls)
    return ChatAnswer(
        content=None if has_other and not joined.content else joined.content,
        reasoning=joined.reasoning or None,
        tool_calls=tuple(
            [ToolCall(call.id or "", call.name or "", call.arguments) for call in joined.tool_calls]
        ),
    )
