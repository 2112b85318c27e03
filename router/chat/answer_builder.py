"""`AnswerBuilder`: collects what a tool parser finds, as deltas."""

from collections.abc import Callable

from baton.common.request.answer import ChatDelta, ToolCallDelta

__all__ = ["AnswerBuilder"]

_MAX_WHITESPACE = 256
"""Maximum length of whitespace that is held back because it may stand alone beside a call."""


class AnswerBuilder:
    """Content and tool calls, taken as one delta per piece of text.

    Whitespace beside a call is no content: neither between two calls, nor before the first call
    if there is no other text, nor after the last call. It is therefore held back until other
    text follows.

    Args:
        new_call_id: makes the id of a call.
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._num_calls = 0
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []
        self._whitespace = ""
        self._holds_whitespace = True

    def content(self, text: str) -> None:
        """Adds content."""
        if not self._holds_whitespace:
            self._content.append(text)
            return
        self._whitespace += text
        if len(self._whitespace) > _MAX_WHITESPACE or not self._whitespace.isspace():
            self._release_whitespace()

    def start_call(self, name: str, call_id: str = "") -> None:
        """Adds a call without arguments.

        Args:
            name: the function's.
            call_id: empty: the call gets a new one.
        """
        self._end_call()
        self._calls.append(ToolCallDelta(self._num_calls, call_id or self._new_call_id(), name))
        self._num_calls += 1
        self._whitespace = ""
        self._holds_whitespace = True

    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the latest call."""
        self._arguments.append(text)

    def take(self) -> ChatDelta:
        """Returns what was added since the last time."""
        self._end_call()
        delta = ChatDelta(content="".join(self._content), tool_calls=tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return delta

    def finish(self) -> None:
        """Says that nothing else is added: decides about whitespace that is held back."""
        if not self._num_calls:
            self._release_whitespace()

    def _release_whitespace(self) -> None:
        if self._whitespace:
            self._content.append(self._whitespace)
            self._whitespace = ""
            self._holds_whitespace = False

    def _end_call(self) -> None:
        """Joins the collected arguments to the call that they belong to."""
        if not self._arguments:
            return
        text = "".join(self._arguments)
        self._arguments.clear()
        if self._calls:
            last = self._calls[-1]
            self._calls[-1] = ToolCallDelta(last.index, last.id, last.name, text)
        else:
            self._calls.append(ToolCallDelta(self._num_calls - 1, arguments=text))
