"""Checks of the types of JSON values that a user sent. Errors name a value by its path.

A leaf module like `baton.common.errors`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from baton.common.errors import InvalidArgumentError

__all__ = ["array_at", "boolean_at", "is_array", "object_at", "text_at"]


def object_at(path: str, value: Any) -> Mapping[str, Any]:
    """Returns a value that must be an object.

    Raises:
        InvalidArgumentError: it has another type, or is None.
    """
    if not isinstance(value, Mapping):
        raise _refusal(path, value, "a JSON object")
    return value


def array_at(path: str, value: Any, max_elements: int | None = None) -> Sequence[Any]:
    """Returns a value that must be an array.

    Args:
        path: names the value.
        value: the value.
        max_elements: the most elements that it may have; None for no limit.

    Raises:
        InvalidArgumentError: it has another type or too many elements, or is None.
    """
    if not is_array(value):
        raise _refusal(path, value, "an array")
    if max_elements is not None and len(value) > max_elements:
        limit = f"at most {max_elements} are allowed"
        raise InvalidArgumentError(f"{path} has {len(value)} elements; {limit}")
    return value


def text_at(path: str, value: Any, form: str = "a text") -> str:
    """Returns a value that must be a text.

    Args:
        path: names the value.
        value: the value.
        form: what it must be, for errors.

    Raises:
        InvalidArgumentError: it has another type, or is None.
    """
    if not isinstance(value, str):
        raise _refusal(path, value, form)
    return value


def boolean_at(path: str, value: Any) -> bool:
    """Returns a value that must be true or false.

    Raises:
        InvalidArgumentError: it has another type, or is None.
    """
    if not isinstance(value, bool):
        raise _refusal(path, value, "true or false")
    return value


def is_array(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a value is an array: a sequence, but no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _refusal(path: str, value: Any, form: str) -> InvalidArgumentError:
    if value is None:
        return InvalidArgumentError(f"{path} is missing; it must be {form}")
    return InvalidArgumentError.for_field(path, value, form)
