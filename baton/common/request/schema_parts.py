"""`SchemaPart`: a JSON schema within a larger one, such as the parameters of one of several tools.

A leaf module. Schemas are JSON data: dicts, lists, texts, numbers, booleans and None.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "MAX_PARTS",
    "SchemaPart",
    "change_references",
    "rebase",
    "references_of",
    "replace_at",
    "value_at",
]

MAX_PARTS = 1024
_OF_VALUES = ("const", "enum", "default", "examples", "example")
"""Keywords that have values, in which `$ref` means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPart:
    """A schema within a form that a client sent in a field of its own.

    Attributes:
        pointer: its JSON pointer in the form.
        field: the client's field, for errors.
        is_hint: what no grammar library enforces is left out, and not refused.
        root: the JSON pointer of the schema around it, to which its references are relative.
    """

    pointer: str
    field: str
    is_hint: bool = False
    root: str = ""

    @property
    def base(self) -> str:
        """How a reference to the part itself is written."""
        return f"#{self.pointer.removeprefix(self.root)}"


def value_at(document: Any, pointer: str) -> Any:
    """Returns the value that a JSON pointer means.

    Raises:
        LookupError: there is none.
    """
    for step in _steps(pointer):
        document = document[_key(document, step)]
    return document


def replace_at(document: Any, pointer: str, value: Any) -> Any:
    """Returns a copy of a document with another value where a JSON pointer points.

    Raises:
        LookupError: there is no such place.
    """
    steps = _steps(pointer)
    if not steps:
        return value
    key, rest = _key(document, steps[0]), pointer[len(steps[0]) + 1 :]
    copy = document.copy()
    copy[key] = replace_at(document[key], rest, value)
    return copy


def rebase(schema: Any, old: str, new: str) -> Any:
    """Returns a copy of a schema in which references to `old` and below begin with `new`."""

    def rebased(reference: str) -> str:
        is_below = reference == old or reference.startswith(f"{old}/")
        return new + reference.removeprefix(old) if is_below else reference

    return change_references(schema, rebased)


def references_of(schema: Any) -> set[str]:
    """Returns the references in a schema."""
    references = set[str]()

    def note(reference: str) -> str:
        references.add(reference)
        return reference

    change_references(schema, note)
    return references


def change_references(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a copy of a schema with other references."""
    if isinstance(value, list):
        return [change_references(item, change) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {name: _changed(name, item, change) for name, item in value.items()}


def _changed(name: str, item: Any, change: Callable[[str], str]) -> Any:
    if name in _OF_VALUES and not isinstance(item, Mapping):
        return item  # a property may have the name of such a keyword; its schema is a mapping
    if name == "$ref" and isinstance(item, str):
        return change(item)
    return change_references(item, change)


def _steps(pointer: str) -> Sequence[str]:
    return pointer.split("/")[1:]


def _key(document: Any, step: str) -> Any:
    """Returns the key or index of a step.

    Raises:
        LookupError: the document has none.
    """
    if isinstance(document, Mapping):
        return step.replace("~1", "/").replace("~0", "~")
    if isinstance(document, list) and step.isascii() and step.isdecimal():
        return int(step)
    raise LookupError(step)
