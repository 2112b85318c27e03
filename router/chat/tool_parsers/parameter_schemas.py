"""Schemas of functions' parameters: what values a parameter's schema accepts."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

__all__ = ["NO_TEXT", "TEXT", "Accepted", "FunctionSchema"]

_MAX_WORK = 256
"""Maximum number of schemas that are looked at for one parameter: references may be cycles."""
_MAX_DEPTH = 32
_VALUES_PER_SCHEMA = 16
"""Number of values of an enum that count as one more schema."""
_MAX_VALUES = 1024
"""Maximum number of values of an enum that are told apart; of more, only the types are."""
_INDEX = re.compile(r"\d{1,9}", re.ASCII)
_STRING = frozenset({"string"})
_ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_TYPES = {
    **{name: frozenset({name}) for name in _ALL_TYPES},
    "number": frozenset({"number", "integer"}),
}
# Names that are not JSON Schema's, which schemas made of Python or of databases have.
_OTHER_NAMES = {
    "string": ("str", "text", "varchar", "char", "enum"),
    "integer": ("int", "long", "short"),
    "number": ("num", "float", "double", "decimal"),
    "boolean": ("bool",),
    "object": ("dict", "map"),
    "array": ("list", "arr", "tuple", "set"),
    "null": ("none",),
}
_TYPES |= {name: _TYPES[kind] for kind, names in _OTHER_NAMES.items() for name in names}
# The types of the values that JSON is read as.
_TYPES_OF_CLASS: Mapping[type, frozenset[str]] = {
    type(None): _TYPES["null"],
    bool: _TYPES["boolean"],
    str: _STRING,
    int: _TYPES["number"],
    float: frozenset({"number"}),
    list: _TYPES["array"],
    dict: _TYPES["object"],
}
# Keywords that imply the type of a schema which states none.
_KEYWORDS = {
    "object": ("properties", "additionalProperties", "patternProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("pattern", "minLength", "maxLength", "format"),
}


@dataclass(frozen=True, slots=True)
class Accepted:
    """Values that a schema accepts: all of some types, and single ones.

    Attributes:
        types: JSON Schema's names of the types.
        values: the JSON of the single values.
    """

    types: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()

    @property
    def is_any_text(self) -> bool:
        """Whether the values are all texts, and no others."""
        return self.types == _STRING and not self.values

    @property
    def may_be_text(self) -> bool:
        """Whether one of the values is a text."""
        return "string" in self.types or any(value.startswith('"') for value in self.values)

    def accepts(self, value: Any) -> bool:
        """Returns whether a value is one of them."""
        if not self.types.isdisjoint(_types_of_value(value)):
            return True
        return bool(self.values) and _json_of(value) in self.values

    def narrowed_by(self, other: "Accepted") -> "Accepted":
        """Returns the types and values that both accept; those of this one if there are none."""
        if _UNSTATED in (self, other):
            return other if self == _UNSTATED else self
        if other == _ANYTHING:
            return self
        types = self.types & other.types
        values = (self.values & other.values) | self._matching(other) | other._matching(self)
        return Accepted(types, values) if types or values else self

    def _matching(self, other: "Accepted") -> frozenset[str]:
        """Returns the single values that have one of another's types."""
        return frozenset(
            [
                value
                for value in self.values
                if not other.types.isdisjoint(_types_of_value(json.loads(value)))
            ]
        )


TEXT = Accepted(_STRING)
"""All texts, and nothing else."""
NO_TEXT = Accepted(_ALL_TYPES - _STRING)
"""All values but texts."""
_ANYTHING = Accepted(_ALL_TYPES)
_UNSTATED = Accepted()
"""The values of a schema that states neither types nor values. A parameter then is a text."""


class FunctionSchema:
    """The schema of a function's parameters.

    Args:
        tools: the tools of the request, as in OpenAI's chat API, checked.
        name: the function's; it may be of no tool.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], name: str) -> None:
        self._root: Mapping[str, Any] = {}
        for tool in tools:
            function = tool.get("function", {})
            if function.get("name") == name:
                self._root = _mapping(function.get("parameters"))
                break

    @cached_property
    def _objects(self) -> list[Mapping[str, Any]]:
        """The schema and those that it is made of, each of which may state parameters."""
        return _Reader(self._root).parts(self._root)

    @cached_property
    def _properties(self) -> list[Mapping[str, Any]]:
        return [_mapping(part.get("properties")) for part in self._objects]

    def may_have(self, parameter: str) -> bool:
        """Returns whether the function has a parameter of this name, as far as its schema says."""
        stated = [names for names in self._properties if names]
        return not stated or any(parameter in names for names in stated)

    def accepted(self, parameter: str) -> Accepted:
        """Returns the types and values that a parameter may have."""
        schemas = [names[parameter] for names in self._properties if parameter in names]
        # Patterns are not run: one that a client sends may take forever.
        for part in () if schemas else self._objects:
            schemas += _mapping(part.get("patternProperties")).values()
            schemas.append(part.get("additionalProperties"))
        schemas = [schema for schema in schemas[:_MAX_WORK] if isinstance(schema, Mapping)]
        reader = _Reader(self._root)
        return _united(map(reader.accepted, schemas)) if schemas else TEXT


class _Reader:
    """Reads one schema, and the schemas that it refers to.

    Args:
        root: the schema that references begin at.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._work_left = _MAX_WORK

    def parts(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns a schema and those that it is made of, up to a number of them."""
        found = [schema]
        for part in found:
            target = self._resolved(part.get("$ref"), part)
            found += [] if target is None else [target]
            for keyword in ("allOf", "anyOf", "oneOf"):
                found += _schemas(part, keyword)
            if len(found) >= _MAX_WORK:
                break
        return found

    def accepted(self, schema: Mapping[str, Any], depth: int = 0) -> Accepted:
        """Returns what a schema accepts; anything if that takes too long to find out."""
        found = _accepted_by_keywords(schema)
        self._work_left -= 1 + len(found.values) // _VALUES_PER_SCHEMA
        if depth == _MAX_DEPTH:
            return _ANYTHING
        if "$ref" in schema:
            target = self._resolved(schema["$ref"], schema)
            found = self._narrowed(found, self._accepted_by_part(target, depth))
        for part in _schemas(schema, "allOf"):
            found = self._narrowed(found, self._accepted_by_part(part, depth))
        for keyword in ("anyOf", "oneOf"):
            options = _schemas(schema, keyword)
            if options:
                united = _united(self._accepted_by_part(option, depth) for option in options)
                found = self._narrowed(found, united)
        is_nullable = schema.get("nullable") is True
        return _united((found, Accepted(_TYPES["null"]))) if is_nullable else found

    def _accepted_by_part(self, part: Mapping[str, Any] | None, depth: int) -> Accepted:
        """Returns what a part of a schema accepts; anything if the part is not known."""
        if part is None or self._work_left <= 0:
            return _ANYTHING
        return self.accepted(part, depth + 1)

    def _narrowed(self, found: Accepted, other: Accepted) -> Accepted:
        self._work_left -= (len(found.values) + len(other.values)) // _VALUES_PER_SCHEMA
        return found.narrowed_by(other)

    def _resolved(self, reference: Any, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Returns what a reference within the root, or within the schema itself, refers to."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target = _at_pointer(self._root, reference[1:])
        return _at_pointer(schema, reference[1:]) if target is None else target


def _accepted_by_keywords(schema: Mapping[str, Any]) -> Accepted:
    """Returns what a schema accepts by its own keywords, besides those that combine schemas."""
    if "const" in schema:
        return Accepted(values=frozenset({_json_of(schema["const"])}))
    if isinstance(values := schema.get("enum"), list) and values:
        if len(values) > _MAX_VALUES:
            kinds = set(map(type, values))
            return Accepted(frozenset[str]().union(*[_TYPES_OF_CLASS[kind] for kind in kinds]))
        return Accepted(values=frozenset(map(_json_of, values)))
    return Accepted(_stated_types(schema))


def _stated_types(schema: Mapping[str, Any]) -> frozenset[str]:
    stated = schema.get("type")
    names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
    found = [_TYPES.get(name.lower(), _ALL_TYPES) for name in names if isinstance(name, str)]
    if not found:
        words = [(_TYPES[kind], words) for kind, words in _KEYWORDS.items()]
        found = [types for types, words in words if any(word in schema for word in words)]
    return frozenset[str]().union(*found)


def _united(parts: Iterable[Accepted]) -> Accepted:
    """Returns what one of several schemas accepts."""
    types, values = set[str](), set[str]()
    for accepted in parts:
        types |= accepted.types if accepted != _UNSTATED else _STRING
        values |= accepted.values
    return Accepted(frozenset(types), frozenset(values))


def _at_pointer(root: Mapping[str, Any], pointer: str) -> Mapping[str, Any] | None:
    """Returns the schema at a JSON pointer, written as the fragment of a reference."""
    value: Any = root
    for part in unquote(pointer).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and _INDEX.fullmatch(name) and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return None
    return value if isinstance(value, Mapping) and pointer[:1] in ("", "/") else None


def _schemas(schema: Mapping[str, Any], keyword: str) -> list[Mapping[str, Any]]:
    """Returns the schemas in a list, up to a number of them."""
    options = schema.get(keyword)
    if not isinstance(options, list):
        return []
    return [option for option in options[:_MAX_WORK] if isinstance(option, Mapping)]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _types_of_value(value: Any) -> frozenset[str]:
    if isinstance(value, float) and value.is_integer():
        return _TYPES["number"]
    return _TYPES_OF_CLASS[type(value)]


def _json_of(value: Any) -> str:
    """Returns the JSON of a value, which is the same for all forms of a number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
