"""Texts of bounded length for errors: values that a caller chose, and whole messages."""

import reprlib
from collections.abc import Collection
from itertools import islice
from typing import Any

from typing_extensions import override

__all__ = ["MAX_SHOWN_CHARS", "cut_bytes", "short_name", "short_names", "short_repr"]

MAX_SHOWN_CHARS = 128
"""The most characters of a caller's value, key or name in an error; as many as a request id has."""
_MAX_SHOWN_NAMES = 8
_CUT = "..."


def short_repr(value: Any) -> str:
    """A short text of a value of any size; `repr` of a huge integer would raise ValueError."""
    if isinstance(value, int) and not -(10**20) < value < 10**20:
        return "an integer of more than 20 digits"
    return _SHORT.repr(value)


def short_names(names: Collection[Any]) -> str:
    """The first of some names that a caller chose, and how many follow."""
    shown = ", ".join(map(short_repr, islice(names, _MAX_SHOWN_NAMES)))
    num_left = len(names) - _MAX_SHOWN_NAMES
    return f"{shown} and {num_left} more" if num_left > 0 else shown


def short_name(name: str) -> str:
    """A key or a path that a caller chose, without its middle if it is long."""
    if len(name) <= MAX_SHOWN_CHARS:
        return name
    num_kept = (MAX_SHOWN_CHARS - len(_CUT)) // 2
    return f"{name[:num_kept]}{_CUT}{name[-num_kept:]}"


def cut_bytes(text: str, max_bytes: int) -> str:
    """A text without its end if it has more bytes of UTF-8. A lone surrogate, which a caller's JSON
    may have, becomes a question mark.
    """
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - len(_CUT)].decode(errors="ignore") + _CUT


class _ShortRepr(reprlib.Repr):
    """Shows the first entries of objects; the base class would sort the keys of them all."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_SHOWN_CHARS

    @override
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_SHORT = _ShortRepr()
