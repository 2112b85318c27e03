"""Copies a client's JSON for a template: plain types only, bounded depth, valid Unicode."""

from collections.abc import Mapping
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import MAX_JSON_DEPTH

__all__ = ["plain_copy"]

_MAX_PATH_CHARS = 200

_Path = tuple["_Path | None", str | int]
"""A place in the data: the place around it, and the key or index there. Its text is made for an
error only: a client can choose long keys.
"""


def plain_copy(field: str, value: Any) -> Any:
    """Returns a copy of JSON data in plain types, which a template may read safely.

    Objects of other types could have methods that Jinja's sandbox does not know.

    Args:
        field: names the data in errors.
        value: JSON data; any mapping is an object, lists and tuples are arrays.

    Raises:
        InvalidArgumentError: a value is not JSON data, a text has a lone surrogate, or the data
            nests too deeply; names the field by its path.
    """
    return _copy((None, field), value, MAX_JSON_DEPTH)


def _copy(path: _Path, value: Any, depth: int) -> Any:
    """Copies a value; at most `depth` levels of objects and arrays may follow."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return _copy_text(path, value)
    if isinstance(value, int | float):  # a subclass, such as an enum
        return float(value) if isinstance(value, float) else int(value)
    if not isinstance(value, Mapping | list | tuple):
        raise _error(path, f"must be JSON data, not {type(value).__name__}")
    if depth == 0:
        raise _error(path, f"nests too deeply; at most {MAX_JSON_DEPTH} levels are allowed")
    if isinstance(value, Mapping):
        return {
            _copy_key(path, key): _copy((path, key), item, depth - 1) for key, item in value.items()
        }
    return [_copy((path, i), item, depth - 1) for i, item in enumerate(value)]


def _copy_key(path: _Path, key: Any) -> str:
    if not isinstance(key, str):
        raise _error(path, f"has a key that is a {type(key).__name__}; keys must be texts")
    return _copy_text((path, key), key)


def _copy_text(path: _Path, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _error(
            path, f"is not valid Unicode: lone surrogate at character {error.start}"
        ) from None
    return str.__str__(text)


def _error(path: _Path, reason: str) -> InvalidArgumentError:
    keys = []
    place: _Path | None = path
    while place is not None:
        place, key = place
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key[:_MAX_PATH_CHARS]}")
    name = "".join(reversed(keys)).removeprefix(".")[:_MAX_PATH_CHARS]
    # A client's key may have surrogates itself.
    return InvalidArgumentError(f"{name.encode(errors='replace').decode()} {reason}")
