"""`FinalMessage`: makes a prompt end right after the text of its last message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.common.errors import InvalidArgumentError

__all__ = ["FinalMessage"]

_FIELD = "continue_final_message"
_MARK = "END_OF_FINAL_MESSAGE_TEXT"
"""Written after the final message's text; the prompt is cut there."""
_SPACE = " "
"""Follows the mark: a template that removes it has removed the text's own trailing space, too."""


@dataclass(frozen=True, slots=True)
class FinalMessage:
    """The text that an answer continues. `mark` makes one."""

    text: str

    @classmethod
    def mark(cls, messages: Sequence[dict[str, Any]], template: str) -> "FinalMessage":
        """Writes a mark after the last message's text, or after its last part that has text.

        Args:
            messages: the messages; the last one is changed.
            template: the template's source.

        Raises:
            InvalidArgumentError: there is no text, or the template reads no content.
        """
        if "content" not in template:
            raise InvalidArgumentError(f"{_FIELD} is true, but the chat template reads no content")
        message = messages[-1]
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = content + _MARK + _SPACE
            return cls(content)
        for part in reversed(content or []):
            if isinstance(part, dict) and isinstance(text := part.get("text"), str):
                part["text"] = text + _MARK + _SPACE
                return cls(text)
        raise InvalidArgumentError(f"{_FIELD} is true, but the final message has no text")

    def cut(self, prompt: str) -> str:
        """Returns the prompt up to the end of the text.

        Raises:
            InvalidArgumentError: the template left the text out, or changed it.
        """
        end = prompt.rfind(_MARK)
        if end < 0 or self.text.strip() not in prompt:
            raise InvalidArgumentError(
                f"{_FIELD} is true, but the chat template leaves out or changes the text of the "
                "final message"
            )
        is_kept = prompt.startswith(_SPACE, end + len(_MARK))
        return prompt[:end] if is_kept else prompt[:end].rstrip()
