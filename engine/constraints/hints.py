"""Schemas that are hints, without the parts that a backend does not enforce.

The parameters of tools are hints unless the tool is `strict`. A relaxed schema accepts all that the
schema accepts, as far as the backend can tell.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from baton.common.errors import InvalidArgumentError
from baton.common.request.schema_parts import (
    SchemaPart,
    rebase,
    references_of,
    replace_at,
    value_at,
)
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.interface import RefusedError
from engine.constraints.schema import change_children, check_schema, without_problems

__all__ = ["ANY_OBJECT", "change_hints", "relax_schema", "repair_schema", "schemas_of_parts"]

ANY_OBJECT = {"type": "object"}
"""The schema that is left of a hint of which nothing can be enforced."""
_MAX_CHECKS = 400
# What matters most of a schema; other keywords are tried after these.
_ORDER = (
    *("type", "enum", "const", "properties", "required", "items", "prefixItems", "anyOf", "oneOf"),
    *("allOf", "additionalProperties", "patternProperties"),
)
_DEFINITIONS = ("$defs", "definitions")


def schemas_of_parts(outputs: StructuredOutputs) -> list[tuple[SchemaPart, Any]]:
    """Returns the parts of a form and their schemas, with references that are relative to these."""
    document = json.loads(str(getattr(outputs, outputs.form))) if outputs.parts else None
    return [
        (part, rebase(value_at(document, part.pointer), part.base, "#")) for part in outputs.parts
    ]


def change_hints(outputs: StructuredOutputs, change: Callable[[Any], Any]) -> StructuredOutputs:
    """Returns a form with other schemas of its parts that are hints."""
    document = json.loads(str(getattr(outputs, outputs.form)))
    for part, schema in schemas_of_parts(outputs):
        if part.is_hint:
            changed = rebase(change(schema), "#", part.base)
            document = replace_at(document, part.pointer, changed)
    return replace(outputs, **{outputs.form: document})


def repair_schema(schema: Any) -> Any:
    """Returns a schema that is well-formed: the given one, or one that is weaker."""
    for candidate in (schema, _without_lost_references(without_problems(schema))):
        if _is_sound(candidate):
            return candidate
    return ANY_OBJECT


def _is_sound(schema: Any) -> bool:
    try:
        check_schema(schema, "schema")
    except InvalidArgumentError:
        return False
    return isinstance(schema, Mapping)


def relax_schema(schema: Mapping[str, Any], check: Callable[[Any], None]) -> Any:
    """Returns a schema that a backend enforces, with as much of the given one as it can.

    Args:
        schema: a well-formed schema.
        check: raises RefusedError if the backend does not enforce all of a schema.
    """
    relaxer = _Relaxer(check)
    for candidate in relaxer.candidates(_without_lost_references(schema)):
        if _is_sound(candidate) and relaxer.is_enforced(candidate):
            return candidate
    return ANY_OBJECT


class _Relaxer:
    def __init__(self, check: Callable[[Any], None]) -> None:
        self._check = check
        self._num_checks = 0

    def candidates(self, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yields weaker and weaker forms of a schema."""
        yield schema
        relaxed = self._relax(schema)
        yield relaxed
        yield _without_references(relaxed)

    def is_enforced(self, schema: Any) -> bool:
        """Whether the backend enforces a schema; False once too many have been tried."""
        self._num_checks += 1
        if self._num_checks > _MAX_CHECKS:
            return False
        try:
            self._check(schema)
        except RefusedError:
            return False
        return True

    def _relax(self, schema: Any) -> Any:
        """Returns a schema of which the backend enforces every part, apart from references."""
        if not isinstance(schema, Mapping):
            return schema
        schema = change_children(schema, self._relax, _DEFINITIONS)
        if self.is_enforced(_without_references(schema)):
            return schema
        relaxed = change_children(schema, self._relax)
        if self.is_enforced(_without_references(relaxed)):
            return relaxed
        kept = {name: relaxed[name] for name in _DEFINITIONS if name in relaxed}
        for keyword, value in _in_order(relaxed):
            if keyword == "anyOf" and "oneOf" in kept:
                continue
            if self.is_enforced(_without_references(kept | {keyword: value})):
                kept[keyword] = value
        return kept


def _in_order(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the keywords of a schema by their importance; `oneOf` counts as `anyOf` too."""
    for keyword in (*_ORDER, *(name for name in schema if name not in _ORDER)):
        if keyword in schema and keyword not in _DEFINITIONS:
            yield keyword, schema[keyword]
        if keyword == "oneOf" in schema and "anyOf" not in schema:
            yield "anyOf", schema["oneOf"]


def _without_references(schema: Any) -> Any:
    """Returns a schema in which any value stands for each reference, without definitions."""
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(schema.get("$ref"), str):
        schema = {name: value for name, value in schema.items() if name != "$ref"}
    bare = {name: value for name, value in schema.items() if name not in _DEFINITIONS}
    return change_children(bare, _without_references)


def _without_lost_references(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema without the references that point to no schema in it."""

    def is_lost(reference: str) -> bool:
        try:
            target = value_at(schema, unquote(reference).removeprefix("#"))
        except (LookupError, TypeError):
            return True
        return not reference.startswith("#") or not isinstance(target, bool | Mapping)

    lost = {reference for reference in references_of(schema) if is_lost(reference)}

    def drop(node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node
        kept = {name: value for name, value in node.items() if name != "$ref" or value not in lost}
        return change_children(kept, drop)

    return drop(schema) if lost else schema
