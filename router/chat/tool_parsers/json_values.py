"""Reads JSON values of calls from text that arrives in pieces, without parsing any text twice."""

import re

from router.chat.text_input import WHITESPACE, Steps, TextInput
from router.chat.tool_parsers.scalars import Sink, escape, read_surrogates
from router.chat.tool_parsers.value_reader import ValueReader

__all__ = ["copy_quoted_value", "copy_value", "read_string"]

_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_HEX_DIGITS = re.compile(r"[0-9a-fA-F]+")
_SHORT_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_REPLACEMENT = "\ufffd"
_MAX_BLANKS = 256


def copy_value(text: TextInput, sink: Sink) -> Steps[bool]:
    """Reads a value. Returns False if it is malformed or not complete.

    What models write although JSON does not allow it becomes JSON; see `ValueReader`.

    Args:
        text: read up to the value's end, or up to the first character that no value can have.
        sink: called with each piece of the value.
    """
    return ValueReader(text, sink, is_python=False).read()


def copy_quoted_value(text: TextInput, sink: Sink) -> Steps[bool]:
    """Reads a string that stands for the text of an object, and copies the object.

    An empty string is an empty object. Any other string is copied itself.

    Returns:
        False if the string does not end.
    """
    quote = text.read()
    blanks = yield from text.read_run(WHITESPACE, _MAX_BLANKS)
    if (yield from text.skip(quote)):
        sink("{}")
        return True
    if (yield from text.peek()) == "{":
        return (yield from _copy_unescaped_value(text, quote, sink))
    sink(f'"{escape(blanks)}')
    is_whole = yield from _unescape(text, quote, lambda piece: sink(escape(piece)))
    sink('"' if is_whole else "")
    return is_whole


def read_string(text: TextInput, max_length: int) -> Steps[str | None]:
    """Reads a short string and returns what it stands for; None if it is none or too long."""
    quote = yield from text.peek()
    if quote not in _PLAIN:
        return None
    text.read()
    pieces: list[str] = []
    num_left = max_length
    while num_left > 0:
        pieces.append((yield from text.read_run(_PLAIN[quote], num_left)))
        next_char = yield from text.peek()
        text.read()
        if next_char == quote:
            return "".join(pieces)
        if next_char != "\\":
            return None
        num_left -= len(pieces[-1]) + 1
        pieces.append((yield from _read_escape(text)))
    return None


def _copy_unescaped_value(text: TextInput, quote: str, sink: Sink) -> Steps[bool]:
    """Reads the rest of a string, and copies the value that it stands for.

    Text behind the value is left out. If the value is malformed, its rest is copied as it is.
    """
    inner = TextInput()

    def copy_inner() -> Steps[None]:
        is_whole = yield from copy_value(inner, sink)
        yield from inner.copy_rest((lambda _: None) if is_whole else sink)

    steps = copy_inner()

    def push(piece: str) -> None:
        inner.push(piece)
        next(steps, None)

    is_whole = yield from _unescape(text, quote, push)
    inner.end()
    next(steps, None)
    return is_whole


def _unescape(text: TextInput, quote: str, sink: Sink) -> Steps[bool]:
    """Reads the rest of a string, behind its opening quote. Returns False if it does not end.

    Args:
        text: read up to and with the closing quote.
        quote: the closing quote.
        sink: called with each piece of the text that the string stands for.
    """
    while True:
        yield from text.copy(_PLAIN[quote], sink)
        next_char = yield from text.peek()
        if not next_char:
            return False
        text.read()
        if next_char == quote:
            return True
        sink((yield from _read_escape(text)))


def _read_escape(text: TextInput) -> Steps[str]:
    """Reads an escape behind its backslash, and a second one if they are one character."""
    kind = yield from text.peek()
    text.read()
    if kind != "u":
        return _SHORT_ESCAPES.get(kind, kind)
    digits = yield from text.read_run(_HEX_DIGITS, 4)
    if len(digits) < 4:
        return _REPLACEMENT
    return (yield from read_surrogates(text, int(digits, 16)))
