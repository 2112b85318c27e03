"""`Fields`: reads the fields of a JSON object and checks their types."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import utf8_of
from baton.common.request.json_values import array_at, boolean_at, object_at, text_at

__all__ = ["Fields"]


class Fields:
    """The fields of a JSON object. A null counts as unset.

    Args:
        value: the object.
        path: names it in errors, such as `input[2]`; empty for a request's body.

    Raises:
        InvalidArgumentError: by each method and for `value`: a value has another type than it
            must have, or is unset and required; names its path.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        self.raw = object_at(path or "the body", value)
        self.path = path

    def path_of(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        """A value of any type."""
        return self.raw.get(name)

    def required(self, name: str) -> Any:
        """A value of any type that must be set."""
        value = self.raw.get(name)
        if value is None:
            raise InvalidArgumentError(f"{self.path_of(name)} is missing")
        return value

    def text(self, name: str) -> str | None:
        """A text, or None."""
        value = self.raw.get(name)
        return None if value is None else _text(self.path_of(name), value)

    def required_text(self, name: str) -> str:
        """A text that must be set."""
        return _text(self.path_of(name), self.required(name))

    def choice(self, name: str, allowed: Collection[str]) -> str | None:
        """One of the allowed texts, or None."""
        value = self.raw.get(name)
        if value is not None and (not isinstance(value, str) or value not in allowed):
            raise InvalidArgumentError.for_field(
                self.path_of(name), value, f"one of {', '.join(allowed)}"
            )
        return value

    def boolean(self, name: str) -> bool | None:
        """True, false or None."""
        value = self.raw.get(name)
        return None if value is None else boolean_at(self.path_of(name), value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        """An integer in [least, most], or None. A number such as 2.0 is one."""
        value = self.raw.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidArgumentError.for_field(
                self.path_of(name), value, f"an integer in [{least}, {most}]"
            )
        return value

    def object(self, name: str) -> "Fields | None":
        """The fields of an object, or None."""
        value = self.raw.get(name)
        return None if value is None else Fields(value, self.path_of(name))

    def objects(self, name: str) -> "Iterator[Fields]":
        """The entries of an array of objects; none if it is unset."""
        value, path = self.raw.get(name), self.path_of(name)
        if value is None:
            return
        for i, entry in enumerate(array_at(path, value)):
            yield Fields(entry, f"{path}[{i}]")

    def refuse(self, names: Mapping[str, str]) -> None:
        """Refuses fields that are set to more than false or an empty value.

        Args:
            names: why, by name.
        """
        for name, reason in names.items():
            if self.raw.get(name) not in (None, False, "", [], {}):
                raise InvalidArgumentError(f"{self.path_of(name)} is not supported: {reason}")


def _text(path: str, value: Any) -> str:
    text = text_at(path, value)
    utf8_of(path, text)
    return text
