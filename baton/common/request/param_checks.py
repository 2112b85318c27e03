"""Checks and conversions of the fields of `SamplingParams`. Pure."""

import ctypes
import math
from collections.abc import Callable, Collection, Sequence
from operator import index
from typing import Any

from baton.common.errors import InvalidArgumentError

__all__ = [
    "MAX_ENTRIES",
    "MAX_STOPS",
    "MAX_STOP_BYTES",
    "MAX_UINT32",
    "check_count",
    "check_float32",
    "check_ids",
    "check_texts",
    "param_biases",
    "param_entries",
    "param_integer",
]

MAX_STOP_BYTES = 256
MAX_UINT32 = 2**32 - 1
_MAX_LOGIT_BIASES = 1024
MAX_STOPS = 16
MAX_ENTRIES = {
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOPS,
    "bad_words": 256,
    "allowed_token_ids": 2**18,  # about a megabyte in every message that carries the request
}
"""The most entries of each field that is a list."""


def param_entries(field: str, value: Any) -> tuple[Any, ...]:
    """Returns the texts or token ids of a field; a text that stands alone is a list of one."""
    if isinstance(value, str):
        return (value,)
    kind = "token ids" if field.endswith("token_ids") else "texts"
    try:
        check_count(field, value, MAX_ENTRIES[field])
        entries = tuple(map(index, value) if kind == "token ids" else value)
    except TypeError:
        raise InvalidArgumentError.for_field(field, value, f"a list of {kind}") from None
    return tuple(dict.fromkeys(entries)) if field == "allowed_token_ids" else entries


def param_integer(field: str, value: Any) -> int:
    """Returns an integer of any type. Raises InvalidArgumentError."""
    try:
        return int(index(value))
    except TypeError:
        raise InvalidArgumentError.for_field(field, value, "an integer") from None


def param_biases(value: Any) -> dict[int, float]:
    """Returns the entries of `logit_bias` by ascending token id; ids may be texts, as in JSON."""
    try:
        check_count("logit_bias", value, _MAX_LOGIT_BIASES)
        biases = {
            int(token_id) if isinstance(token_id, str) else index(token_id): float(bias)
            for token_id, bias in value.items()
        }
    except (AttributeError, OverflowError, TypeError, ValueError):
        limit = "a mapping from token ids to numbers"
        raise InvalidArgumentError.for_field("logit_bias", value, limit) from None
    return dict(sorted(biases.items()))


def check_count(field: str, entries: Collection[Any], most: int) -> None:
    """Raises InvalidArgumentError if a field has more entries than `most`."""
    if len(entries) > most:
        raise InvalidArgumentError(
            f"{field} has {len(entries)} entries; at most {most} are allowed"
        )


def check_texts(field: str, texts: Sequence[Any]) -> None:
    """Raises InvalidArgumentError unless each entry is a text of 1 to `MAX_STOP_BYTES` bytes."""
    for text in texts:
        if not isinstance(text, str):
            raise InvalidArgumentError.for_field(field, text, "a list of texts")
        if not 0 < len(text.encode(errors="surrogatepass")) <= MAX_STOP_BYTES:
            limit = f"1 to {MAX_STOP_BYTES} bytes of UTF-8"
            raise InvalidArgumentError.for_field(field, text[:64], limit)


def check_ids(field: str, token_ids: Collection[int]) -> None:
    """Raises InvalidArgumentError if an id does not fit 32 bits."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id <= MAX_UINT32:
            raise InvalidArgumentError.for_field(field, token_id, "below the vocabulary size")


def check_float32(field: str, value: float, is_good: Callable[[float], bool], limit: str) -> None:
    """Raises InvalidArgumentError unless a value is good, and the 32-bit number that workers get
    for it is, too.
    """
    for number in (value, _as_float32(value)):
        if not is_good(number):
            raise InvalidArgumentError.for_field(field, number, limit)


def _as_float32(value: float) -> float:
    """Returns the nearest 32-bit number; infinity for a value beyond them."""
    try:
        return ctypes.c_float(value).value
    except OverflowError:  # an integer beyond 64-bit numbers
        return math.inf
