"""The keywords of JSON Schema that constrain values, and which values the keywords themselves take.

By JSON Schema 2020-12, all other keywords are annotations, and so is a `format` that an
implementation does not know.
"""

import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BOUNDS", "Problem", "problems_of", "without_annotations"]

FORMATS = frozenset(
    ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""The formats that a backend enforces."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_PAIRS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_OLD_DRAFT = re.compile(r"https?://json-schema\.org/draft-0[0-3]/")


@dataclass(frozen=True, slots=True)
class _Values:
    """The values that a keyword takes.

    Attributes:
        allows: whether it takes a value.
        limit: the values in words, for errors.
    """

    allows: Callable[[Any], bool]
    limit: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A keyword with a value that it does not take.

    Attributes:
        path: the JSON pointer of the schema that has it.
        keyword: the keyword.
        text: the problem in words, to follow the name of a field.
    """

    path: str
    keyword: str
    text: str


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | Mapping)


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of(value: Any, allows: Callable[[Any], bool], *, min_length: int = 0) -> bool:
    return isinstance(value, list) and len(value) >= min_length and all(map(allows, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in _TYPES


_SCHEMA = _Values(_is_schema, "a schema")
_SCHEMAS = _Values(
    lambda value: _is_list_of(value, _is_schema, min_length=1), "a list of schemas, not empty"
)
_NAMED_SCHEMAS = _Values(
    lambda value: isinstance(value, Mapping) and all(map(_is_schema, value.values())),
    "an object of schemas",
)
_COUNT = _Values(_is_count, "an integer >= 0")
_NUMBER = _Values(_is_number, "a number")
_NUMBER_OR_BOOLEAN = _Values(lambda value: isinstance(value, bool) or _is_number(value), "a number")
_TEXTS = _Values(lambda value: _is_list_of(value, _is_text), "a list of texts")
_TEXT = _Values(_is_text, "a text")
_BOOLEAN = _Values(lambda value: isinstance(value, bool), "true or false")
_ANY = _Values(lambda _: True, "any value")

_KEYWORDS: Mapping[str, _Values] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _NAMED_SCHEMAS),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(
        ("additionalProperties", "unevaluatedProperties", "propertyNames", "contains", "not"),
        _SCHEMA,
    ),
    **dict.fromkeys(("additionalItems", "unevaluatedItems", "if", "then", "else"), _SCHEMA),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minContains"), _COUNT),
    **dict.fromkeys(("maxContains", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _NUMBER_OR_BOOLEAN),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef"), _TEXT),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _ANY),
    **dict.fromkeys(("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"), _ANY),
    "type": _Values(
        lambda value: _is_type(value) or _is_list_of(value, _is_type, min_length=1),
        f"one of {', '.join(_TYPES)}, or a list of them",
    ),
    "enum": _Values(lambda value: _is_list_of(value, lambda _: True, min_length=1), "a list"),
    "const": _ANY,
    "items": _Values(
        lambda value: _is_schema(value) or _is_list_of(value, _is_schema), "a schema or a list"
    ),
    "required": _TEXTS,
    "uniqueItems": _BOOLEAN,
    "multipleOf": _Values(lambda value: _is_number(value) and value > 0, "a number > 0"),
    "$schema": _Values(lambda value: not _OLD_DRAFT.match(str(value)), "that of draft 4 or later"),
}
"""Keywords that constrain values or that references need. Other keywords are annotations."""


def problems_of(path: str, node: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields the keywords of a schema, without those in it, that have values they do not take.

    Args:
        path: the JSON pointer of the schema.
        node: the schema.
    """
    wrong = set()
    for keyword, value in node.items():
        values = _KEYWORDS.get(keyword, _ANY)
        if not values.allows(value):
            wrong.add(keyword)
            yield Problem(path, keyword, _text(keyword, value, values.limit, path))
        elif keyword in BOUNDS and isinstance(value, int) and not -(2**63) < value < 2**63:
            yield Problem(path, keyword, f"has a {keyword} past 64 bits at {path}")
    for least, most in _PAIRS:
        if (
            least in node
            and most in node
            and not {least, most} & wrong
            and node[least] > node[most]
        ):
            limit = f"at most {most} {node[most]}"
            yield Problem(path, most, _text(least, node[least], limit, path))


def _text(keyword: str, value: Any, limit: str, path: str) -> str:
    if value == []:
        return f"has an empty {keyword} at {path}"
    return f"is not supported: {keyword} is {reprlib.repr(value)} at {path}; it must be {limit}"


def without_annotations(node: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema with the keywords alone that constrain values or that references need.

    Whole numbers of lengths become integers, and `uniqueItems: false` says nothing. The schemas in
    it are left as they are.
    """
    kept = {name: value for name, value in node.items() if _constrains(name, value)}
    return {name: _integer(value) if _is_length(name) else value for name, value in kept.items()}


def _constrains(keyword: str, value: Any) -> bool:
    if keyword == "format":
        return isinstance(value, str) and value in FORMATS
    return keyword in _KEYWORDS and (keyword, value) != ("uniqueItems", False)


def _is_length(keyword: str) -> bool:
    return _KEYWORDS[keyword] is _COUNT


def _integer(value: Any) -> Any:
    return int(value) if _is_count(value) else value
