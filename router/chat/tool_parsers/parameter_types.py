"""Values of parameters that models write as plain text: from text and a schema to JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from router.chat.text_input import TextInput
from router.chat.tool_parsers.value_reader import ValueReader

__all__ = ["is_text", "json_of", "parameter_schema"]

_OBJECT = "object"


def parameter_schema(
    tools: Sequence[Mapping[str, Any]], name: str, parameter: str
) -> Mapping[str, Any]:
    """Returns the schema of a parameter of a function; empty if it is unknown.

    Args:
        tools: as in OpenAI's chat API, checked.
        name: the function's.
        parameter: the parameter's name.
    """
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            schema = properties.get(parameter)
            return schema if isinstance(schema, Mapping) else {}
    return {}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Returns whether a value can only be text; so is one whose schema states no type."""
    return set(_types(schema)) <= {"string"}


def json_of(value: str, schema: Mapping[str, Any]) -> str:
    """Returns the JSON for a value: JSON or a Python literal; otherwise it is text.

    Args:
        value: what the model wrote.
        schema: the parameter's. If it allows text, only null is anything else.
    """
    types = set(_types(schema))
    written = value.strip()
    if written.lower() in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if "string" in types:
        return json.dumps(value, ensure_ascii=False)
    if "boolean" in types and written.lower() in ("true", "false"):
        return written.lower()
    return _literal(written) or json.dumps(value, ensure_ascii=False)


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the types that a schema allows, as far as it states them."""
    stated = schema.get("type")
    if isinstance(stated, str):
        yield stated
    elif isinstance(stated, Sequence):
        yield from map(str, stated)
    elif "$ref" in schema or "allOf" in schema:
        yield _OBJECT
    for keyword in ("anyOf", "oneOf"):
        for option in schema.get(keyword) or ():
            if isinstance(option, Mapping):
                yield from _types(option)


def _literal(written: str) -> str | None:
    try:
        return json.dumps(json.loads(written), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return _python_literal(written)


def _python_literal(written: str) -> str | None:
    text = TextInput()
    text.push(written)
    text.end()
    pieces: list[str] = []
    try:
        next(ValueReader(text, pieces.append, is_python=True).read())
    except StopIteration as stop:
        if stop.value and not text.num_unread:
            return "".join(pieces)
    return None
