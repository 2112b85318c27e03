"""JSON objects from users: parsed, bounded, and written as compact text.

A leaf module like `baton.common.errors`.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_values import object_at, text_at
from baton.common.short_texts import short_repr

__all__ = ["MAX_JSON_BYTES", "MAX_JSON_DEPTH", "check_text", "compact_json", "utf8_of"]

MAX_JSON_BYTES = 256 * 1024
"""The most UTF-8 bytes of a JSON object, unless the caller states another limit."""
MAX_JSON_DEPTH = 64
"""How deeply a JSON object may nest objects and arrays."""


def compact_json(field: str, source: Any, most_bytes: int = MAX_JSON_BYTES) -> str:
    """Returns the JSON text of an object, without whitespace, its keys in their order.

    Args:
        field: names the object in errors.
        source: the object as a dict or a JSON text.
        most_bytes: how many bytes of UTF-8 the text may have.

    Raises:
        InvalidArgumentError: it is no JSON object, too large or too deep.
    """
    if isinstance(source, str):
        check_text(field, source, most_bytes)
        source = _parsed(field, source)
    object_at(field, source)
    try:
        _check_structure(field, source, most_bytes)
        text = json.dumps(source, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{field} is not JSON: {error}") from None
    check_text(field, text, most_bytes)
    return text


def check_text(field: str, text: Any, most_bytes: int) -> int:
    """Returns how many bytes of UTF-8 a text has.

    Raises:
        InvalidArgumentError: it is not a str, is empty or too large, or has NUL or a lone
            surrogate.
    """
    if not text_at(field, text):
        raise InvalidArgumentError(f"{field} is empty")
    if "\0" in text:
        raise InvalidArgumentError(f"{field} contains a NUL character")
    num_bytes = len(utf8_of(field, text))
    if num_bytes > most_bytes:
        limit = f"at most {most_bytes} are allowed"
        raise InvalidArgumentError(f"{field} has {num_bytes} bytes of UTF-8; {limit}")
    return num_bytes


def utf8_of(field: str, text: str) -> bytes:
    """Returns a text in UTF-8.

    Raises:
        InvalidArgumentError: it has a lone surrogate.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{field} is not valid Unicode: lone surrogate at character {error.start}"
        ) from None


def _parsed(field: str, text: str) -> Any:
    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON value")

    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{field} is not JSON: {error}") from None


def _check_structure(field: str, source: Any, most_bytes: int) -> None:
    """Refuses keys that are no texts, which `json.dumps` would convert, deep nesting, and more
    values than the text may have bytes, before it is made.
    """
    level, num_values = [source], 1
    for _ in range(MAX_JSON_DEPTH):
        level = [child for value in level for child in _children(field, value)]
        num_values += len(level)
        if num_values > most_bytes:
            raise InvalidArgumentError(
                f"{field} has more than {most_bytes} values; its text may have {most_bytes} bytes"
            )
    if any(isinstance(value, Mapping | list | tuple) for value in level):
        raise InvalidArgumentError(f"{field} nests more than {MAX_JSON_DEPTH} levels deep")


def _children(field: str, value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidArgumentError(
                    f"{field} has the key {short_repr(key)}; keys must be texts"
                )
        return value.values()
    return value if isinstance(value, list | tuple) else ()
