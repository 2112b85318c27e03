"""OpenAI's `response_format`, `tools` and `tool_choice` as fields of `StructuredOutputs`.

A leaf module; `StructuredOutputs.of_response_format` and `StructuredOutputs.of_tools` use it.
Errors name the part that is malformed, such as `tools[0].function.name`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import compact_json
from baton.common.request.json_values import array_at, boolean_at, object_at, text_at
from baton.common.request.schema_parts import SchemaPart, change_references, rebase
from baton.common.short_texts import short_name, short_repr

__all__ = ["ToolSchema", "fields_of_response_format", "fields_of_tools", "read_tools"]

_NO_PARAMETERS = {"type": "object", "properties": {}}


def fields_of_response_format(response_format: Any) -> dict[str, Any] | None:
    """Returns the fields that a `response_format` states; None for one that allows any text.

    Raises:
        InvalidArgumentError: a part is unknown or malformed; names it.
    """
    form = object_at("response_format", response_format)
    kind = form.get("type")
    match kind:
        case "text":
            _check_names("response_format", form, ("type",))
            return None
        case "json_object":
            _check_names("response_format", form, ("type",))
            return {"json_object": True}
        case "json_schema":
            _check_names("response_format", form, ("type", "json_schema"))
            return {"json": _parse_schema("response_format.json_schema", form.get("json_schema"))}
        case "structural_tag":
            return {"structural_tag": compact_json("response_format", form)}
    limit = "one of text, json_object, json_schema, structural_tag"
    raise InvalidArgumentError.for_field("response_format.type", kind, limit)


def fields_of_tools(
    tools: Any,
    tool_choice: Any,
    parallel_tool_calls: bool = True,
    schema_fields: Sequence[str] = (),
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
        schema_fields: as for `read_tools`.

    Raises:
        InvalidArgumentError: a part is unknown or malformed; names it.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    name = None if tool_choice == "required" else _chosen_name(tool_choice)
    functions = read_tools(tools, schema_fields)
    if name is None:
        return _form_of_calls(list(functions.values()), parallel_tool_calls)
    if name not in functions:
        limit = f"the name of one of tools: {', '.join(functions)}"
        raise InvalidArgumentError.for_field("tool_choice.function.name", name, limit)
    return _form_of_call(functions[name].schema, [functions[name].part("")])


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """The parameters of a tool.

    Attributes:
        name: the function's.
        schema: a copy of the JSON schema of its parameters.
        field: the client's field of the schema, for errors.
        is_strict: whether calls must obey all of the schema; otherwise it is a hint.
    """

    name: str
    schema: dict[str, Any]
    field: str
    is_strict: bool

    def part(self, pointer: str, root: str = "") -> SchemaPart:
        """Returns the schema at a JSON pointer, with the field that it comes from."""
        return SchemaPart(pointer=pointer, field=self.field, is_hint=not self.is_strict, root=root)


def read_tools(tools: Any, schema_fields: Sequence[str] = ()) -> dict[str, ToolSchema]:
    """Returns the functions of tools as OpenAI's chat API describes them, by name.

    Keys that say nothing of the form of calls are ignored, such as `cache_control`.

    Args:
        tools: the tools.
        schema_fields: the client's fields of the tools' schemas, for errors; empty: those of the
            chat API.

    Raises:
        InvalidArgumentError: a tool is malformed, or two have one name; names it.
    """
    if not array_at("tools", tools):
        raise InvalidArgumentError("tools is empty; tool_choice forces a call")
    functions: dict[str, ToolSchema] = {}
    for i, tool in enumerate(tools):
        schema_field = schema_fields[i] if schema_fields else f"tools[{i}].function.parameters"
        function = _parse_function(f"tools[{i}]", tool, schema_field)
        if function.name in functions:
            raise InvalidArgumentError(
                f"tools[{i}].function.name is {short_repr(function.name)}, the name of an "
                "earlier tool"
            )
        functions[function.name] = function
    return functions


def _form_of_call(schema: dict[str, Any], parts: Sequence[SchemaPart]) -> dict[str, Any]:
    """The form of a forced call: JSON without optional whitespace, which small models may write
    until the limit cuts the call.
    """
    json_schema = compact_json("tools", schema)
    return {"json": json_schema, "disable_any_whitespace": True, "parts": parts}


def _form_of_calls(functions: Sequence[ToolSchema], parallel_tool_calls: bool) -> dict[str, Any]:
    """The form of an array of calls. The schema of each tool is a definition of its own, within
    which its references point.
    """
    calls, parts = [], []
    definitions: dict[str, Any] = {}
    for i, function in enumerate(functions):
        pointer = f"#/$defs/{i}"
        definitions[str(i)] = rebase(function.schema, "#", pointer)
        parts.append(function.part(pointer.removeprefix("#")))
        name = {"type": "string", "enum": [function.name]}
        call = {"name": name, "parameters": {"$ref": pointer}}
        calls.append({"type": "object", "properties": call, "required": list(call)})
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel_tool_calls:
        schema["maxItems"] = 1
    return _form_of_call(schema | {"$defs": definitions}, parts)


def _parse_schema(field: str, value: Any) -> str:
    """Returns the schema of a `response_format` as JSON text.

    `strict` is accepted for any value: the schema is enforced in either case.
    """
    part = object_at(field, value)
    _check_names(field, part, ("name", "description", "schema", "strict"))
    for name, check in (("name", text_at), ("description", text_at), ("strict", boolean_at)):
        if part.get(name) is not None:
            check(f"{field}.{name}", part[name])
    return compact_json(f"{field}.schema", part.get("schema"))


def _chosen_name(tool_choice: Any) -> str:
    """Returns the name of the function that must be called."""
    if not isinstance(tool_choice, Mapping):
        limit = "none, auto, required, or an object that names a function"
        raise InvalidArgumentError.for_field("tool_choice", tool_choice, limit)
    _check_names("tool_choice", tool_choice, ("type", "function"))
    _check_is_function("tool_choice", tool_choice)
    function = object_at("tool_choice.function", tool_choice.get("function"))
    _check_names("tool_choice.function", function, ("name",))
    return _parse_name("tool_choice.function", function)


def _parse_function(field: str, value: Any, schema_field: str) -> ToolSchema:
    tool = object_at(field, value)
    _check_is_function(field, tool)
    field = f"{field}.function"
    function = object_at(field, tool.get("function"))
    strict = function.get("strict")
    is_strict = strict is not None and boolean_at(f"{field}.strict", strict)
    parameters = json.loads(compact_json(schema_field, function.get("parameters") or {}))
    return ToolSchema(
        name=_parse_name(field, function),
        schema=_without_identity(parameters) or dict(_NO_PARAMETERS),
        field=schema_field,
        is_strict=is_strict,
    )


def _without_identity(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema without its `$id`, which would have no meaning within another schema."""
    identity = schema.pop("$id", None)
    if not isinstance(identity, str):
        return schema
    base = identity.removesuffix("#")
    return dict(change_references(schema, partial(_local, base)))


def _local(identity: str, reference: str) -> str:
    """Returns a reference into the schema of an identity as a local one."""
    is_own = reference.removeprefix(identity)[:1] in ("", "#") and reference.startswith(identity)
    return f"#{reference.removeprefix(identity).removeprefix('#')}" if is_own else reference


def _parse_name(field: str, function: Mapping[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError.for_field(f"{field}.name", name, "a text that is not empty")
    return name


def _check_is_function(field: str, value: Mapping[str, Any]) -> None:
    if value.get("type") != "function":
        raise InvalidArgumentError.for_field(f"{field}.type", value.get("type"), "'function'")


def _check_names(field: str, value: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in value:
        if name not in known:
            raise InvalidArgumentError(
                f"{field}.{short_name(name)} is unknown; it has {', '.join(known)}"
            )
