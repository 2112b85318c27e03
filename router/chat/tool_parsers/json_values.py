"""Reads JSON values from text that arrives in pieces, without parsing any text twice.

Values are copied as they are; only strings and brackets are looked at, to find a value's end.
"""

import json
import re
from collections.abc import Callable

from router.chat.text_input import Steps, TextInput

__all__ = ["copy_string_rest", "copy_unescaped", "copy_value", "read_string"]

_CLOSING = {"{": "}", "[": "]"}
_BETWEEN = re.compile(r"[ \t\r\n:,0-9A-Za-z+.\-]+")
_SCALAR = re.compile(r"[0-9A-Za-z+.\-]+")
_PLAIN = re.compile(r'[^"\\]+')
_HEX_DIGITS = re.compile(r"[0-9a-fA-F]+")
_SHORT_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_REPLACEMENT = "\ufffd"


def copy_value(text: TextInput, sink: Callable[[str], object]) -> Steps[bool]:
    """Reads a value. Returns False if it is malformed or not complete.

    Args:
        text: read up to the value's end, or up to the first character that no value can have.
        sink: called with each piece of the value.
    """
    closing: list[str] = []
    while True:
        next_char = yield from text.peek()
        if next_char == '"':
            sink(text.read())
            if not (yield from copy_string_rest(text, sink)):
                return False
        elif next_char in _CLOSING:
            closing.append(_CLOSING[next_char])
            sink(text.read())
        elif closing and next_char == closing[-1]:
            closing.pop()
            sink(text.read())
        else:
            run = _BETWEEN if closing else _SCALAR
            if not run.match(next_char):
                return False
            yield from text.copy(run, sink)
        if not closing:
            return True


def read_string(text: TextInput, max_length: int) -> Steps[str | None]:
    """Reads a short string and returns what it stands for; None if it is none or too long."""
    if not (yield from text.skip('"')):
        return None
    written = '"'
    while len(written) <= max_length:
        written += yield from text.read_run(_PLAIN, max_length + 1 - len(written))
        next_char = yield from text.peek()
        if not next_char:
            return None
        written += text.read()
        if next_char == '"':
            return _loads(written)
        if next_char == "\\" and (yield from text.peek()):
            written += text.read()
    return None


def copy_string_rest(text: TextInput, sink: Callable[[str], object]) -> Steps[bool]:
    """Reads the rest of a string, behind its opening quote. Returns False if it does not end.

    Args:
        text: read up to and with the closing quote.
        sink: called with each piece of the text as it is written.
    """
    while True:
        yield from text.copy(_PLAIN, sink)
        next_char = yield from text.peek()
        if not next_char:
            return False
        sink(text.read())
        if next_char == '"':
            return True
        # The character behind a backslash, which may be a quote.
        if (yield from text.peek()):
            sink(text.read())


def copy_unescaped(text: TextInput, sink: Callable[[str], object]) -> Steps[bool]:
    """Reads the rest of a string, behind its opening quote. Returns False if it does not end.

    Args:
        text: read up to and with the closing quote.
        sink: called with each piece of the text that the string stands for.
    """
    while True:
        yield from text.copy(_PLAIN, sink)
        next_char = yield from text.peek()
        if not next_char:
            return False
        text.read()
        if next_char == '"':
            return True
        sink((yield from _read_escape(text)))


def _read_escape(text: TextInput) -> Steps[str]:
    """Reads an escape behind its backslash, and a second one if they are one character."""
    kind = yield from text.peek()
    if kind != "u":
        text.read()
        return _SHORT_ESCAPES.get(kind, kind)
    text.read()
    code = yield from _read_hex(text)
    if 0xD800 <= code < 0xDC00 and (yield from text.skip("\\u")):
        low = yield from _read_hex(text)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
        return _REPLACEMENT + _character(low)
    return _character(code)


def _read_hex(text: TextInput) -> Steps[int]:
    digits = yield from text.read_run(_HEX_DIGITS, 4)
    return int(digits, 16) if len(digits) == 4 else ord(_REPLACEMENT)


def _character(code: int) -> str:
    """Returns a character; half a surrogate pair is none."""
    return _REPLACEMENT if 0xD800 <= code < 0xE000 else chr(code)


def _loads(written: str) -> str | None:
    try:
        value = json.loads(written, strict=False)
    except ValueError:
        return None
    # Half a surrogate pair cannot be sent to a client.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None
