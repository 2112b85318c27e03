"""`parse_json`: JSON of clients, refused before it is parsed if its values would cost too much.

The standard parser holds the interpreter's lock while it runs, and makes up to 90 bytes of every
byte: 16 MiB of `[],[],...` would stop all threads for seconds and take 500 MB. So the values are
counted first, in small pieces that let other threads run. What is left costs a bounded time: the
parser calls the hooks below, in which other threads run too.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from baton.common.errors import InvalidArgumentError

__all__ = [
    "MAX_DIGITS",
    "MAX_PARTS",
    "MAX_VALUES",
    "InvalidJsonError",
    "JsonBudget",
    "parse_json",
]

MAX_PARTS = 2**17
"""The most objects, arrays and texts of a JSON text, keys included."""
MAX_VALUES = 2**20 + 2**17
"""The most values of a JSON text, numbers included: a prompt of a million token ids fits."""
MAX_DIGITS = 400
"""The most characters of a number: the time to convert one grows with their square."""
_TOO_LONG = f"a number has more than {MAX_DIGITS} characters"
_PIECE_BYTES = 64 * 1024
_MAX_SHOWN_BYTES = 64
_TOKEN = re.compile(rb'("(?:[^"\\]++|\\.)*+")(\s*+:)?+|[\[\]{}]', re.DOTALL)
"""A text, which is a key if a colon follows it, or the start or end of an array or object."""


@dataclass(slots=True)
class JsonBudget:
    """The number of values that JSON texts may still hold, together."""

    parts: int = MAX_PARTS
    values: int = MAX_VALUES


class InvalidJsonError(InvalidArgumentError):
    """A text is not JSON."""


class _TooLargeError(Exception):
    """A JSON text has too many values; `position` is behind the last one that was counted."""

    def __init__(self, position: int, limit: str) -> None:
        super().__init__(limit)
        self.position = position


def parse_json(field: str, text: bytes | str, budget: JsonBudget | None = None) -> Any:
    """Returns the value of a JSON text. May run in any thread.

    Args:
        field: names the text in errors.
        text: the JSON text, in UTF-8 if it is bytes.
        budget: what the text may hold, which is taken from it; None: what one text may hold.

    Raises:
        InvalidJsonError: the text is not JSON, or nests too deeply; names the field.
        InvalidArgumentError: the text has more values than the budget; names its outermost
            object's field that has too many, or the field.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    try:
        _take(budget or JsonBudget(), data)
    except _TooLargeError as error:
        name = _field_at(data, error.position)
        place = f"{name} is too large: " if name else ""
        raise InvalidArgumentError(f"{place}{field} has more than {error}") from None
    try:
        # Some clients begin with a byte order mark, which is no JSON.
        whole = text if isinstance(text, str) else str(data, "utf-8-sig", "surrogatepass")
        return json.loads(whole, object_hook=_object, parse_int=_integer, parse_float=_number)
    except RecursionError:
        raise InvalidJsonError(f"{field} is not JSON: it nests too deeply") from None
    except ValueError as error:
        raise InvalidJsonError(f"{field} is not JSON: {error}") from None


def _object(value: dict[str, Any]) -> dict[str, Any]:
    """Returns an object as it is: a call of Python code lets other threads run."""
    return value


def _integer(text: str) -> int:
    # Called for each id of a long prompt: a further call would cost half as much again.
    if len(text) > MAX_DIGITS:
        raise ValueError(_TOO_LONG)
    return int(text)


def _number(text: str) -> float:
    if len(text) > MAX_DIGITS:
        raise ValueError(_TOO_LONG)
    return float(text)


def _take(budget: JsonBudget, data: bytes) -> None:
    """Takes the values of a JSON text from a budget.

    Quotes separate texts from structure, without their escapes. The count may be wrong for what is
    no JSON, such as escapes outside of texts, but the parser stops there.

    Raises:
        _TooLargeError: the text has more values.
    """
    start, is_in_text = 0, False
    num_quotes = budget.parts * 2
    while start < len(data):
        end = _end_of_piece(data, start)
        piece = data[start:end].replace(rb"\\", b"").replace(rb"\"", b"")
        sections = piece.split(b'"')
        outside = b"".join(sections[is_in_text::2])
        is_in_text ^= len(sections) % 2 == 0
        num_quotes -= len(sections) - 1 + 2 * (outside.count(b"[") + outside.count(b"{"))
        budget.values -= outside.count(b",")
        start = end
        if num_quotes < 0:
            raise _TooLargeError(end, f"{MAX_PARTS} objects, arrays and texts")
        if budget.values < 0:
            raise _TooLargeError(end, f"{MAX_VALUES} values")
    budget.parts = num_quotes // 2


def _end_of_piece(data: bytes, start: int) -> int:
    """The end of the piece of a JSON text that begins at `start`. It divides no escape."""
    end = start + _PIECE_BYTES
    piece = data[start:end]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return end + num_backslashes % 2


def _field_at(data: bytes, position: int) -> str:
    """The name of the outermost object's field that holds a position; empty if there is none."""
    depth, name = 0, b""
    for match in _TOKEN.finditer(data, 0, position):
        if match[2] is not None and depth == 1:
            name = data[match.start() + 1 : min(match.end(1) - 1, match.start() + _MAX_SHOWN_BYTES)]
        elif match[1] is None:
            depth += 1 if data[match.start()] in b"[{" else -1
    return name.decode(errors="replace")
