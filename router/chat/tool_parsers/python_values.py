"""Reads Python literals from text that arrives in pieces, and writes them as JSON.

Strings are converted piece by piece; numbers and words when they are complete.
"""

import json
import math
import re
from collections.abc import Callable
from typing import TypeAlias

from router.chat.text_input import Steps, TextInput

__all__ = ["convert_value"]

Sink: TypeAlias = Callable[[str], object]

_MAX_DEPTH = 64
_MAX_WORD_LENGTH = 256
_WORD = re.compile(r"[\w.+\-]+")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_SHORT_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_HEX_DIGITS = re.compile(r"[0-9a-fA-F]+")
_OCTAL_DIGITS = re.compile(r"[0-7]+")


def convert_value(text: TextInput, sink: Sink, depth: int = 0) -> Steps[bool]:
    """Reads a string, number, list, dict, True, False or None.

    Args:
        text: read up to the value's end. If the value is malformed, it is read up to the mistake,
            and a number or word that cannot be converted goes to the sink as it is.
        sink: called with each piece of the JSON text.
        depth: number of lists and dicts around the value.

    Returns:
        False if the value is malformed or not complete.
    """
    first = yield from text.peek()
    if first in ("'", '"'):
        return (yield from _convert_string(text, sink))
    if first in ("[", "{") and depth < _MAX_DEPTH:
        return (yield from _convert_items(text, sink, depth + 1))
    word = yield from text.read_run(_WORD, _MAX_WORD_LENGTH)
    converted = _converted_word(word)
    sink(word if converted is None else converted)
    return converted is not None


def _convert_items(text: TextInput, sink: Sink, depth: int) -> Steps[bool]:
    """Reads a list or a dict, whose keys must be strings."""
    is_dict = (yield from text.peek()) == "{"
    closing = "}" if is_dict else "]"
    sink(text.read())
    separator = ""
    while True:
        yield from text.skip_whitespace()
        if (yield from text.skip(closing)):
            sink(closing)
            return True
        sink(separator)
        separator = ", "
        if is_dict and not (yield from _convert_key(text, sink)):
            return False
        if not (yield from convert_value(text, sink, depth)):
            return False
        yield from text.skip_whitespace()
        if not (yield from text.skip(",")) and (yield from text.peek()) != closing:
            return False


def _convert_key(text: TextInput, sink: Sink) -> Steps[bool]:
    if (yield from text.peek()) not in ("'", '"'):
        return False
    if not (yield from _convert_string(text, sink)):
        return False
    yield from text.skip_whitespace()
    if not (yield from text.skip(":")):
        return False
    sink(": ")
    yield from text.skip_whitespace()
    return True


def _convert_string(text: TextInput, sink: Sink) -> Steps[bool]:
    quote = text.read()
    closing = quote
    sink('"')
    if (yield from text.skip(quote)):
        if not (yield from text.skip(quote)):
            sink('"')
            return True
        closing = quote * 3
    while True:
        yield from text.copy(_PLAIN[quote], lambda piece: sink(_in_string(piece)))
        next_char = yield from text.peek()
        if not next_char:
            return False
        if (yield from text.skip(closing)):
            sink('"')
            return True
        text.read()
        sink(_in_string((yield from _read_escape(text)) if next_char == "\\" else next_char))


def _read_escape(text: TextInput) -> Steps[str]:
    """Reads an escape behind its backslash. An unknown one stands for itself."""
    kind = yield from text.peek()
    octal = yield from text.read_run(_OCTAL_DIGITS, 3)
    if octal:
        return chr(int(octal, 8))
    text.read()
    if kind not in _HEX_LENGTHS:
        return _SHORT_ESCAPES.get(kind, f"\\{kind}")
    digits = yield from text.read_run(_HEX_DIGITS, _HEX_LENGTHS[kind])
    code = int(digits or "0", 16)
    if len(digits) < _HEX_LENGTHS[kind] or code > 0x10FFFF:
        return f"\\{kind}{digits}"
    return chr(code)


def _in_string(text: str) -> str:
    """Returns what stands for a text inside of a JSON string."""
    # Half a surrogate pair must be escaped; everything else is more legible as it is.
    half = any(0xD800 <= ord(char) < 0xE000 for char in text) if len(text) == 1 else False
    return json.dumps(text, ensure_ascii=half)[1:-1]


def _converted_word(word: str) -> str | None:
    """Returns the JSON text for a number or a word; None if there is none."""
    if word in _WORDS:
        return _WORDS[word]
    if word in _WORDS.values():
        return word
    value = _number(word)
    return None if value is None else json.dumps(value)


def _number(word: str) -> float | None:
    try:
        return int(word, 0)
    except ValueError:
        pass
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
