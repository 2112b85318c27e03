"""`ValueReader`: reads a value of JSON or Python from text that arrives in pieces, writes JSON.

Strings are passed on piece by piece; numbers and words when they are complete. No text is read
twice.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from router.chat.text_input import WHITESPACE, Steps, TextInput
from router.chat.tool_parsers.scalars import (
    Sink,
    copy_json_string,
    copy_python_string,
    escape,
    json_of_python_word,
    json_of_word,
)

__all__ = ["ValueReader", "skip_blanks"]

_MAX_PYTHON_DEPTH = 64
_MAX_WORD_LENGTH = 256
_WORD = re.compile(r"[\w.+\-]+")
_COMMENT = re.compile(r"[^\n]+")
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_QUOTES = ("'", '"')
_PREFIXES = ("r", "R", "u", "U")


def skip_blanks(text: TextInput) -> Steps[None]:
    """Reads whitespace and comments of Python."""
    while True:
        yield from text.copy(WHITESPACE, lambda _: None)
        if not (yield from text.skip("#")):
            return
        yield from text.copy(_COMMENT, lambda _: None)


@dataclass(slots=True)
class _Bracket:
    """An open bracket.

    Attributes:
        closing: the character that closes it in the text.
        written: what is written for that character.
        slot: where the opening bracket is in the output that is held back, while what follows
            decides about it; else None.
        is_object: whether it is written as an object.
        expects_key: whether an object's next item, or the one just read, is a key.
        num_items: the number of items that have begun.
        key_slot: where an undecided bracket's first item is in the output, if it is a word.
    """

    closing: str
    written: str
    slot: int | None = None
    is_object: bool = False
    expects_key: bool = False
    num_items: int = 0
    key_slot: int | None = None


class ValueReader:
    """Reads one value.

    JSON is written as it is, besides what JSON does not allow and models write all the same:
    control characters in strings, unknown escapes, single quotes, words of Python, trailing
    commas, keys and words without quotes. Its structure is not checked: if the brackets match,
    the value is whole.

    A Python value is a literal: a string (also several in a row), a number, a list, tuple, set or
    dict, True, False or None. It ends at the first mistake.

    Args:
        text: read up to the value's end, or up to the first character that no value can have.
        sink: called with each piece of the JSON.
        is_python: whether the value is Python's.
        quote: a text before and behind strings that have no escapes; empty: there are none.
    """

    def __init__(self, text: TextInput, sink: Sink, *, is_python: bool, quote: str = "") -> None:
        self._text = text
        self._sink = sink
        self._is_python = is_python
        self._quote = quote
        self._brackets: list[_Bracket] = []
        self._held: list[str] = []
        self._num_undecided = 0
        # A comma and the whitespace behind it, which are written if an item follows.
        self._pending: list[str] = []
        self._after_value = False
        self._after_bracket = False

    def read(self) -> Steps[bool]:
        """Returns whether there was a whole value. Of another one, the sink has the beginning."""
        is_whole = True
        while is_whole := (yield from self._read_token()):
            if not self._brackets:
                break
        if self._held:
            self._sink("".join(self._held))
        return is_whole

    @property
    def _bracket(self) -> _Bracket | None:
        return self._brackets[-1] if self._brackets else None

    def _read_token(self) -> Steps[bool]:
        """Returns False if no token of a value comes next."""
        yield from self._copy_blanks()
        char = yield from self._text.peek()
        bracket = self._bracket
        if bracket is not None and char == bracket.closing:
            return self._close(bracket)
        if bracket is not None and char in (",", ":"):
            return self._separate(bracket, char)
        if not char or (self._is_python and self._after_value):
            return False
        if self._quote and (yield from self._text.skip(self._quote)):
            self._begin_item()
            return (yield from self._read_unescaped_string())
        if char in _QUOTES:
            self._begin_item()
            return (yield from self._read_string())
        if char in _CLOSING:
            return self._open(char)
        return (yield from self._read_word())

    def _copy_blanks(self) -> Steps[None]:
        if self._is_python:
            yield from skip_blanks(self._text)
        elif self._brackets:
            write: Callable[[str], object] = self._pending.append if self._pending else self._write
            yield from self._text.copy(WHITESPACE, write)

    def _write(self, piece: str) -> None:
        if self._num_undecided:
            self._held.append(piece)
        else:
            self._sink(piece)

    def _write_pending(self) -> None:
        for piece in self._pending:
            self._write(piece)
        self._pending.clear()

    def _begin_item(self) -> None:
        self._write_pending()
        self._after_value, self._after_bracket = True, False
        if self._bracket is not None:
            self._bracket.num_items += 1

    def _separate(self, bracket: _Bracket, char: str) -> bool:
        """Reads a comma or colon. Returns False if Python does not allow it here."""
        if self._is_python and not (self._after_value and self._may_separate(bracket, char)):
            return False
        self._text.read()
        self._write_pending()
        self._after_value = False
        if char == ":":
            if bracket.slot is not None:
                self._decide(bracket, "{", "}")
            bracket.expects_key = False
            self._write(": " if self._is_python else ":")
            return True
        if bracket.slot is not None:
            self._decide(bracket, "[", "]")
        bracket.expects_key = bracket.is_object
        self._pending.append(", " if self._is_python else ",")
        return True

    def _may_separate(self, bracket: _Bracket, char: str) -> bool:
        """Whether Python allows a comma or colon behind the item that was just read."""
        if char == ",":
            return not bracket.expects_key or bracket.slot is not None
        return bracket.expects_key and not self._after_bracket

    def _open(self, char: str) -> bool:
        """Reads an opening bracket. Returns False if a Python value is too deep."""
        if self._is_python and len(self._brackets) >= _MAX_PYTHON_DEPTH:
            return False
        self._begin_item()
        self._text.read()
        bracket = _Bracket(_CLOSING[char], "}" if char == "{" else "]")
        bracket.expects_key = char == "{"
        # Parentheses may stand around one value, and braces around a set.
        if char == "(" or (char == "{" and self._is_python):
            self._num_undecided += 1
            bracket.slot = len(self._held)
        bracket.is_object = char == "{" and bracket.slot is None
        self._write("{" if char == "{" else "[")
        self._brackets.append(bracket)
        self._after_value = False
        return True

    def _close(self, bracket: _Bracket) -> bool:
        """Reads a closing bracket. Returns False if Python does not allow it here."""
        is_key_alone = bracket.is_object and bracket.expects_key and self._after_value
        is_value_missing = not (self._after_value or self._pending) and bracket.num_items > 0
        if self._is_python and (is_key_alone or is_value_missing):
            return False
        self._text.read()
        # A comma before the bracket is left out.
        self._pending = self._pending[1:]
        self._write_pending()
        if bracket.slot is not None:
            is_set = bracket.closing == "}" and bracket.num_items > 0
            is_grouping = bracket.closing == ")" and bracket.num_items > 0
            opening = "[" if is_set or bracket.closing == ")" else "{"
            closing = "]" if is_set or bracket.closing == ")" else "}"
            self._decide(bracket, "" if is_grouping else opening, "" if is_grouping else closing)
        self._brackets.pop()
        self._write(bracket.written)
        self._after_value, self._after_bracket = True, True
        return True

    def _decide(self, bracket: _Bracket, opening: str, closing: str) -> None:
        """Writes an opening bracket in its slot; what was held back for it alone follows."""
        assert bracket.slot is not None, "the bracket is decided already"
        self._held[bracket.slot] = opening
        if opening == "{" and bracket.key_slot is not None:
            self._held[bracket.key_slot] = _quoted(self._held[bracket.key_slot])
        bracket.slot, bracket.written = None, closing
        bracket.is_object = opening == "{"
        self._num_undecided -= 1
        if not self._num_undecided:
            self._sink("".join(self._held))
            self._held.clear()

    def _read_string(self) -> Steps[bool]:
        text = self._text
        if not self._is_python and (yield from text.peek()) == '"':
            self._write(text.read())
            return (yield from copy_json_string(text, self._write))
        self._write('"')
        if not (yield from copy_python_string(text, self._write)):
            return False
        if self._is_python and not (yield from self._read_joined_strings()):
            return False
        self._write('"')
        return True

    def _read_unescaped_string(self) -> Steps[bool]:
        """Reads a string behind `quote`, up to and with the next one."""
        self._write('"')
        if not (yield from self._text.copy_until(self._quote, self._write_escaped)):
            return False
        self._write('"')
        return True

    def _write_escaped(self, piece: str) -> None:
        self._write(escape(piece))

    def _read_joined_strings(self) -> Steps[bool]:
        """Reads further strings behind a string. Returns False if one does not end."""
        while True:
            yield from skip_blanks(self._text)
            if (yield from self._text.peek()) not in _QUOTES:
                return True
            if not (yield from copy_python_string(self._text, self._write)):
                return False

    def _read_word(self) -> Steps[bool]:
        """Reads a number, a word, or a key without quotes."""
        text, bracket = self._text, self._bracket
        word = yield from text.read_run(_WORD, _MAX_WORD_LENGTH)
        next_char = yield from text.peek()
        if self._is_python and word in _PREFIXES and next_char in _QUOTES:
            self._begin_item()
            return (yield from self._read_prefixed_string(word))
        if not word:
            return False
        self._begin_item()
        if bracket is not None and bracket.slot is not None and bracket.closing == "}":
            bracket.key_slot = len(self._held)
        is_key = bracket is not None and bracket.is_object and bracket.expects_key
        converted = self._converted(word, is_key=is_key, is_cut=not next_char)
        self._write(word if converted is None else converted)
        if not self._is_python:
            yield from text.copy(_WORD, self._write)  # the rest of a number of many digits
        return converted is not None

    def _converted(self, word: str, *, is_key: bool, is_cut: bool) -> str | None:
        """Returns the JSON of a word; None if Python has no such literal."""
        if self._is_python:
            converted = json_of_python_word(word)
            return _quoted(converted) if converted and is_key else converted
        if is_cut or len(word) == _MAX_WORD_LENGTH:
            return word
        return _quoted(word) if is_key else json_of_word(word)

    def _read_prefixed_string(self, prefix: str) -> Steps[bool]:
        self._write('"')
        is_raw = prefix in ("r", "R")
        if not (yield from copy_python_string(self._text, self._write, is_raw=is_raw)):
            return False
        if not (yield from self._read_joined_strings()):
            return False
        self._write('"')
        return True


def _quoted(word: str) -> str:
    return f'"{escape(word)}"'
