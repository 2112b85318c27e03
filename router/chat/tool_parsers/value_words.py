"""Numbers and words of JSON and Python as JSON."""

import json
import math
import re

__all__ = ["is_json_number", "json_of_number", "json_of_python_word", "json_of_word"]

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_WORDS = frozenset(_PYTHON_WORDS.values())
_NOT_FINITE = frozenset({"NaN", "Infinity", "+Infinity", "-Infinity"})
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)


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
