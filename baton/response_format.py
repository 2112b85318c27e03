"""OpenAI's `response_format`, `tools` and `tool_choice` as fields of `StructuredOutputs`.

A leaf module; `StructuredOutputs.of_response_format` and `StructuredOutputs.of_tools` use it.
Errors name the part that is malformed, such as `tools[0].function.name`.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.errors import InvalidArgumentError
from baton.json_text import compact_json

__all__ = ["fields_of_response_format", "fields_of_tools"]

_NO_PARAMETERS = {"type": "object", "properties": {}}
_DEFINITIONS = ("$defs", "definitions")
"""Keywords of JSON Schema under which a schema keeps the parts that it refers to."""


def fields_of_response_format(response_format: Any) -> dict[str, Any] | None:
    """Returns the fields that a `response_format` states; None for one that allows any text.

    Raises:
        InvalidArgumentError: a part is unknown or malformed; names it.
    """
    given = _object("response_format", response_format)
    kind = given.get("type")
    match kind:
        case "text":
            _check_names("response_format", given, ("type",))
            return None
        case "json_object":
            _check_names("response_format", given, ("type",))
            return {"json_object": True}
        case "json_schema":
            _check_names("response_format", given, ("type", "json_schema"))
            return {"json": _schema_of("response_format.json_schema", given.get("json_schema"))}
        case "structural_tag":
            return {"structural_tag": compact_json("response_format", given)}
    limit = "one of text, json_object, json_schema, structural_tag"
    raise _wrong_value("response_format.type", kind, limit)


def fields_of_tools(
    tools: Any, tool_choice: Any, parallel_tool_calls: bool = True
) -> dict[str, Any] | None:
    """Returns the fields that a choice of tools states, with the meaning that it has in vLLM,
    besides that the text has no optional whitespace.

    Args:
        tools: the tools that the model may call; read only if a call is forced.
        tool_choice: None, "none" or "auto" force no call, for which None is returned. With
            "required", the text is a JSON array of one or more calls, each an object with the
            tool's `name` and its `parameters`. With the name of a function, the text is the
            JSON object of its parameters.
        parallel_tool_calls: False: the array has one call.

    Raises:
        InvalidArgumentError: a part is unknown or malformed; names it.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    name = None if tool_choice == "required" else _chosen_name(tool_choice)
    functions = _functions(tools)
    if name is None:
        schema = _schema_of_calls(functions)
        if not parallel_tool_calls:
            schema["maxItems"] = 1
        return _form_of_call(schema)
    if name not in functions:
        limit = f"the name of one of tools: {', '.join(functions)}"
        raise _wrong_value("tool_choice.function.name", name, limit)
    return _form_of_call(functions[name])


def _form_of_call(schema: dict[str, Any]) -> dict[str, Any]:
    """The form of a forced call: JSON without optional whitespace, which small models may write
    until the limit cuts the call.
    """
    return {"json": compact_json("tools", schema), "disable_any_whitespace": True}


def _schema_of(field: str, value: Any) -> str:
    """Returns the schema of a `response_format` as JSON text.

    `strict` is accepted for any value: the schema is enforced in either case.
    """
    part = _object(field, value)
    _check_names(field, part, ("name", "description", "schema", "strict"))
    _check_kind(f"{field}.name", part.get("name"), str)
    _check_kind(f"{field}.description", part.get("description"), str)
    _check_kind(f"{field}.strict", part.get("strict"), bool)
    return compact_json(f"{field}.schema", part.get("schema"))


def _chosen_name(tool_choice: Any) -> str:
    """Returns the name of the function that must be called."""
    if not isinstance(tool_choice, Mapping):
        limit = "none, auto, required, or an object that names a function"
        raise _wrong_value("tool_choice", tool_choice, limit)
    _check_names("tool_choice", tool_choice, ("type", "function"))
    _check_is_function("tool_choice", tool_choice)
    function = _object("tool_choice.function", tool_choice.get("function"))
    _check_names("tool_choice.function", function, ("name",))
    return _name_of("tool_choice.function", function)


def _functions(tools: Any) -> dict[str, dict[str, Any]]:
    """Returns copies of the schemas of the functions' parameters, by name."""
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise InvalidArgumentError(f"tools must be a list of tools, not {type(tools).__name__}")
    if not tools:
        raise InvalidArgumentError("tools is empty; tool_choice forces a call")
    functions: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        name, parameters = _function_of(f"tools[{i}]", tool)
        if name in functions:
            raise InvalidArgumentError(
                f"tools[{i}].function.name is {name!r}, the name of an earlier tool"
            )
        functions[name] = parameters
    return functions


def _function_of(field: str, value: Any) -> tuple[str, dict[str, Any]]:
    """Returns the name of a tool's function, and a copy of the schema of its parameters."""
    tool = _object(field, value)
    _check_names(field, tool, ("type", "function"))
    _check_is_function(field, tool)
    field = f"{field}.function"
    function = _object(field, tool.get("function"))
    _check_names(field, function, ("name", "description", "parameters", "strict"))
    parameters = compact_json(f"{field}.parameters", function.get("parameters") or {})
    return _name_of(field, function), json.loads(parameters) or dict(_NO_PARAMETERS)


def _schema_of_calls(functions: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the schema of an array of calls.

    Definitions move to its root, because references like `#/$defs/NAME` start there.
    """
    calls = []
    definitions: dict[str, dict[str, Any]] = {}
    for i, (name, parameters) in enumerate(functions.items()):
        field = f"tools[{i}].function.parameters"
        for keyword in _DEFINITIONS:
            own = parameters.pop(keyword, {})
            _add_definitions(f"{field}.{keyword}", own, definitions.setdefault(keyword, {}))
        _check_references(field, [parameters, definitions])
        call = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
        calls.append({"type": "object", "properties": call, "required": list(call)})
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema | {keyword: own for keyword, own in definitions.items() if own}


def _add_definitions(field: str, own: Any, definitions: dict[str, Any]) -> None:
    for name, schema in _object(field, own).items():
        if definitions.setdefault(name, schema) != schema:
            raise InvalidArgumentError(
                f"{field}.{name} differs from the definition of that name in an earlier tool"
            )


def _check_references(field: str, value: Any) -> None:
    """Refuses references into a tool's own schema, which is not the root of the whole schema."""
    roots = tuple(f"#/{keyword}/" for keyword in _DEFINITIONS)
    for reference in _references(value):
        if reference.startswith("#") and not reference.startswith(roots):
            raise InvalidArgumentError(
                f"{field} has the reference {reference!r}; it must begin with one of "
                f"{', '.join(roots)}"
            )


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name == "$ref" and isinstance(item, str):
                yield item
            else:
                yield from _references(item)


def _name_of(field: str, function: Mapping[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong_value(f"{field}.name", name, "a text that is not empty")
    return name


def _check_is_function(field: str, value: Mapping[str, Any]) -> None:
    if value.get("type") != "function":
        raise _wrong_value(f"{field}.type", value.get("type"), "'function'")


def _object(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{field} must be a JSON object, not {type(value).__name__}")
    return value


def _check_names(field: str, value: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in value:
        if name not in known:
            raise InvalidArgumentError(f"{field}.{name} is unknown; it has {', '.join(known)}")


def _check_kind(field: str, value: Any, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        what = "a text" if kind is str else "true or false"
        raise _wrong_value(field, value, what)


def _wrong_value(field: str, value: Any, limit: str) -> InvalidArgumentError:
    """The standard wording, with a value of any size or depth cut short."""
    return InvalidArgumentError(f"{field} is {reprlib.repr(value)}; it must be {limit}")
