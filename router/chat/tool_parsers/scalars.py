"""Scalars of JSON and Python: strings that arrive in pieces, numbers and words, as JSON."""

import json
import math
import re
from collections.abc import Callable
from typing import TypeAlias

from router.chat.text_input import Steps, TextInput

__all__ = [
    "Sink",
    "copy_json_string",
    "copy_python_string",
    "escape",
    "is_json_number",
    "json_of_number",
    "json_of_python_word",
    "json_of_word",
    "read_surrogates",
]

Sink: TypeAlias = Callable[[str], object]

_PLAIN_JSON = re.compile(r'[^"\\]+')
_PLAIN_PYTHON = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_CONTROL = re.compile(r"[\x00-\x1f]")
_HEX_DIGITS = re.compile(r"[0-9a-fA-F]+")
_OCTAL_DIGITS = re.compile(r"[0-7]+")
_JSON_ESCAPES = '"\\/bfnrt'
_PYTHON_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_REPLACEMENT = "\ufffd"
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_WORDS = frozenset(_PYTHON_WORDS.values())
_NOT_FINITE = frozenset({"NaN", "Infinity", "+Infinity", "-Infinity"})
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)


def escape(text: str) -> str:
    """Escapes a text for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def copy_json_string(text: TextInput, sink: Sink) -> Steps[bool]:
    """Reads a string behind its opening quote and writes it, besides what JSON does not allow.

    Control characters are escaped. The backslash of an unknown escape, which regular
    expressions and paths have, stands for itself. Half a surrogate pair is replaced.

    Returns:
        False if the string does not end.
    """
    while True:
        yield from text.copy(_PLAIN_JSON, lambda piece: sink(_without_controls(piece)))
        next_char = yield from text.peek()
        if not next_char:
            return False
        text.read()
        if next_char == '"':
            sink('"')
            return True
        sink((yield from _read_json_escape(text)))


def copy_python_string(text: TextInput, sink: Sink, *, is_raw: bool = False) -> Steps[bool]:
    """Reads a string in single, double or triple quotes and writes what a JSON string has for it.

    Args:
        text: read up to and with the closing quotes.
        sink: called with each piece, without quotes.
        is_raw: whether backslashes stand for themselves.

    Returns:
        False if the string does not end.
    """
    closing = quote = text.read()
    if (yield from text.skip(quote)):
        if not (yield from text.skip(quote)):
            return True
        closing = quote * 3
    while True:
        yield from text.copy(_PLAIN_PYTHON[quote], lambda piece: sink(escape(piece)))
        next_char = yield from text.peek()
        if not next_char:
            return False
        if (yield from text.skip(closing)):
            return True
        text.read()
        if next_char != "\\":
            sink(escape(next_char))
        elif is_raw:
            sink(escape("\\" + ((yield from text.peek()) and text.read())))
        else:
            sink((yield from _read_python_escape(text)))


def read_surrogates(text: TextInput, code: int) -> Steps[str]:
    """Returns the characters of an escaped UTF-16 unit whose digits were read.

    The second unit of a surrogate pair is read too. Half a pair is replaced: it is no text.
    """
    if not 0xD800 <= code < 0xDC00 or not (yield from text.skip("\\u")):
        return _character(code)
    digits = yield from text.read_run(_HEX_DIGITS, 4)
    low = int(digits, 16) if len(digits) == 4 else ord(_REPLACEMENT)
    if 0xDC00 <= low < 0xE000:
        return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
    return _REPLACEMENT + _character(low)


def _character(code: int) -> str:
    return _REPLACEMENT if 0xD800 <= code < 0xE000 else chr(code)


def _without_controls(piece: str) -> str:
    return _CONTROL.sub(lambda match: escape(match[0]), piece)


def _read_json_escape(text: TextInput) -> Steps[str]:
    """Reads an escape behind its backslash; returns it as JSON. One that is cut is nothing."""
    kind = yield from text.peek()
    if not kind:
        return ""
    if kind in _JSON_ESCAPES:
        return "\\" + text.read()
    if kind == "'":
        return text.read()
    if kind != "u":
        return "\\\\"
    text.read()
    digits = yield from text.read_run(_HEX_DIGITS, 4)
    if len(digits) < 4:
        return f"\\\\u{digits}" if (yield from text.peek()) else ""
    code = int(digits, 16)
    if not 0xD800 <= code < 0xE000:
        return f"\\u{digits}"
    return _escaped_pair((yield from read_surrogates(text, code)))


def _escaped_pair(characters: str) -> str:
    """Returns the JSON of what surrogates stand for; a pair stays two escapes."""
    is_pair = len(characters) == 1 and ord(characters) > 0xFFFF
    return json.dumps(characters)[1:-1] if is_pair else escape(characters)


def _read_python_escape(text: TextInput) -> Steps[str]:
    """Reads an escape behind its backslash; returns it as JSON. An unknown one stands for itself,
    and one that is cut is nothing.
    """
    kind = yield from text.peek()
    octal = yield from text.read_run(_OCTAL_DIGITS, 3)
    if octal or not kind:
        return escape(chr(int(octal, 8))) if octal else ""
    text.read()
    if kind not in _HEX_LENGTHS:
        return escape(_PYTHON_ESCAPES.get(kind, f"\\{kind}"))
    digits = yield from text.read_run(_HEX_DIGITS, _HEX_LENGTHS[kind])
    code = int(digits or "0", 16)
    if len(digits) < _HEX_LENGTHS[kind] or code > 0x10FFFF:
        return escape(f"\\{kind}{digits}") if (yield from text.peek()) else ""
    if 0xD800 <= code < 0xE000:
        return _escaped_pair((yield from read_surrogates(text, code)))
    return escape(chr(code))


def json_of_python_word(word: str) -> str | None:
    """Returns the JSON of a number or word of Python or JSON; None if it is neither."""
    if word in _JSON_WORDS:
        return word
    return _PYTHON_WORDS.get(word) or json_of_number(word)


def json_of_word(word: str) -> str:
    """Returns the JSON that comes closest to a number or word in JSON that a model wrote.

    JSON has no numbers that are not finite, for which `JSON.stringify` writes null. Words without
    a meaning are strings whose quotes are missing.
    """
    if word in _NOT_FINITE:
        return "null"
    return json_of_python_word(word) or json.dumps(word, ensure_ascii=False)


def json_of_number(word: str) -> str | None:
    """Returns the JSON of a finite number that Python can read; None if it is none.

    A number that JSON allows stays as it is written, with all of its digits.
    """
    value = _number(word)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return word if is_json_number(word) else json.dumps(value)


def is_json_number(word: str) -> bool:
    """Returns whether JSON allows a number as it is written."""
    return _JSON_NUMBER.fullmatch(word) is not None


def _number(word: str) -> float | None:
    for read in (lambda text: int(text, 0), int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return None
