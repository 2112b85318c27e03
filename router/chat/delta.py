"""`ChatDelta`: what a piece of generated text adds to an answer."""

from dataclasses import dataclass

__all__ = ["ChatDelta", "ToolCallDelta"]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of one tool call.

    Attributes:
        index: the call's number in the answer, from 0.
        id: the call's id; on its first delta only.
        name: the function's name; on its first delta only.
        arguments: further text of the arguments' JSON.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """New text of an answer, by its part. All parts may be empty."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
