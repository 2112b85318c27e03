"""The text of a call of a custom tool, which the model writes as the only argument of a function.

`CustomInput` reads it from JSON that comes in pieces, at a cost that grows with the text alone.
"""

import json
import re

from router.http.responses_tools import INPUT

__all__ = ["CustomInput", "input_of"]

_START = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_MAX_START_CHARS = 64
"""After so many characters without the start of the text, it is read when all of it is there."""
_HIGH = r"u[dD][89abAB][0-9a-fA-F]{2}"  # the first of two escapes that are one character
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPED = (
    r'["\\/bfnrt]'
    r"|u(?![dD][89abAB])[0-9a-fA-F]{4}"
    rf"|{_HIGH}{_LOW}"
    rf"|{_HIGH}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
)
_COMPLETE = re.compile(rf'(?:[^"\\]|\\(?:{_ESCAPED}))*')
"""Characters of a JSON text, and escapes that are complete."""


def input_of(arguments: str) -> str:
    """The text of a call, perhaps cut short. A model may give it another name, or write it
    without JSON.
    """
    reader = CustomInput()
    text = reader.push(arguments)
    if reader.is_open:
        return text
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    values = list(value.values()) if isinstance(value, dict) else []
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments


class CustomInput:
    """The text of one call, piece by piece.

    Attributes:
        is_open: whether the text has begun.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._is_over = False
        self._held = ""
        self._num_given = 0

    def push(self, piece: str) -> str:
        """Adds a piece of the arguments; returns the text that is complete now."""
        if self._is_over:
            return ""
        self._held += piece
        if not self.is_open and not self._opens():
            return ""
        complete = _COMPLETE.match(self._held)
        assert complete is not None, "the pattern matches an empty text"
        self._held = self._held[complete.end() :]
        self._is_over = self._held.startswith('"')
        text: str = json.loads(f'"{complete[0]}"', strict=False)
        self._num_given += len(text)
        return text

    def rest(self, text: str) -> str:
        """Returns the part of the whole text that `push` did not return."""
        return text[self._num_given :]

    def _opens(self) -> bool:
        start = _START.match(self._held)
        if start is not None:
            self._held, self.is_open = self._held[start.end() :], True
        elif len(self._held) > _MAX_START_CHARS:
            self._is_over = True
        return self.is_open
