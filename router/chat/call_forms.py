"""Forms of a text that may have calls: a stated form or calls, and calls of strict tools."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.common.request.json_text import compact_json
from baton.common.request.response_format import ToolSchema, read_tools
from baton.common.request.schema_parts import SchemaPart, rebase
from baton.common.request.structured_outputs import MAX_SOURCE_BYTES, StructuredOutputs
from router.chat.tool_parsers.base import CallSyntax

__all__ = ["form_or_calls", "strict_calls"]

_Format = dict[str, Any]
_ANY_OBJECT = {"type": "object"}
_FIELD = "structured_outputs.json"
_MAX_SCHEMA_BYTES = MAX_SOURCE_BYTES // 2
"""Maximum size of the tools' schemas in a form, which leaves room for the texts around them."""


def form_or_calls(
    form: StructuredOutputs,
    tools: Sequence[Mapping[str, Any]],
    syntax: CallSyntax | None,
    *,
    parallel_tool_calls: bool,
    schema_fields: Sequence[str] = (),
) -> StructuredOutputs:
    """Returns the form of a text that has a stated form, or is calls of tools.

    It is the stated form alone if the model's calls are not known, or if the form is none of JSON
    or choices, which are those of the chat APIs.

    Args:
        form: the stated form.
        tools: the tools, as in OpenAI's chat API.
        syntax: how the model writes calls.
        parallel_tool_calls: whether there may be several calls.
        schema_fields: the client's fields of the tools' schemas, for errors.

    Raises:
        InvalidArgumentError: a tool is malformed, or the tools are too large; names them.
    """
    stated = None if form.whitespace_pattern is not None else _format_of(form)
    if syntax is None or stated is None:
        return form
    if not (functions := _fitting(_functions(tools, schema_fields), syntax)):
        return form
    calls = _Calls(syntax)
    call = _any_of([calls.write(function) for function in functions])
    if parallel_tool_calls:
        call = {"type": "plus", "content": _sequence(call, *_optional(syntax.separators))}
    return calls.tagged(_any_of([stated, call]), is_compact=form.disable_any_whitespace)


def strict_calls(
    tools: Sequence[Mapping[str, Any]],
    syntax: CallSyntax | None,
    schema_fields: Sequence[str] = (),
) -> StructuredOutputs | None:
    """Returns the form of a text in which calls of strict tools obey the tools' schemas.

    Args:
        tools: the tools, as in OpenAI's chat API.
        syntax: how the model writes calls.
        schema_fields: the client's fields of the tools' schemas, for errors.

    Returns:
        None if no tool is strict, or if arguments are not known to be JSON.

    Raises:
        InvalidArgumentError: a tool is malformed, or the tools are too large; names them.
    """
    if syntax is None or not syntax.has_json_arguments or not any(map(_is_strict, tools)):
        return None
    functions = _fitting(_functions(tools, schema_fields), syntax)
    calls, tags = _Calls(syntax), list[_Format]()
    if syntax.opener:
        triggers = [syntax.opener]
        content = _any_of([calls.write_rest(function) for function in functions])
        tags = [{"type": "tag", "begin": syntax.opener, "content": content, "end": ""}]
    else:  # text that begins like a call of another tool may be none
        strict = [function for function in functions if function.is_strict]
        tags = [tag for function in strict for tag in calls.write_named_tags(function)]
        triggers = [tag["begin"] for tag in tags]
    return calls.tagged({"type": "triggered_tags", "triggers": triggers, "tags": tags})


def _functions(
    tools: Sequence[Mapping[str, Any]], schema_fields: Sequence[str]
) -> list[ToolSchema]:
    """Returns the functions among tools; those of other kinds have no calls that are known."""
    places = [i for i, tool in enumerate(tools) if _is_function(tool)]
    fields = schema_fields or [f"tools[{i}].function.parameters" for i in range(len(tools))]
    if not places:
        return []
    return list(read_tools([tools[i] for i in places], [fields[i] for i in places]).values())


def _is_function(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") == "function" and isinstance(tool.get("function"), Mapping)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return _is_function(tool) and tool["function"].get("strict") is True


def _fitting(functions: list[ToolSchema], syntax: CallSyntax) -> list[ToolSchema]:
    """Returns functions, without the schemas that are hints if all together are too large."""
    num_copies = max(1, len(syntax.argument_keys)) * syntax.has_json_arguments
    num_bytes = sum(len(json.dumps(function.schema)) for function in functions)
    if num_bytes * num_copies <= _MAX_SCHEMA_BYTES:
        return functions
    return [
        function if function.is_strict else replace(function, schema=dict(_ANY_OBJECT))
        for function in functions
    ]


def _format_of(form: StructuredOutputs) -> _Format | None:
    """Returns a form as a structural tag's format; None: it has none."""
    if form.json is not None:
        return {"type": "json_schema", "json_schema": json.loads(str(form.json))}
    if form.json_object:
        return {"type": "json_schema", "json_schema": _ANY_OBJECT}
    if form.choice is not None and all(form.choice):
        return _any_of([_const(text) for text in form.choice])
    return None


class _Calls:
    """Writes the formats of calls, and notes whose schemas they have.

    Args:
        syntax: how the model writes calls.
    """

    def __init__(self, syntax: CallSyntax) -> None:
        self._syntax = syntax
        self._owners: dict[int, tuple[ToolSchema, str]] = {}  # by the identity of a schema

    def write(self, function: ToolSchema) -> _Format:
        """Returns the format of a call, with what may end it."""
        syntax = self._syntax
        if syntax.opener:
            opening = (*_optional(syntax.prefixes), _const(syntax.opener))
            call = _sequence(*opening, self.write_rest(function))
        elif syntax.has_json_arguments:
            call = self._write_object(function)
        else:
            call = _any_of(self.write_tags(function))
        return _sequence(call, *_optional(syntax.closers))

    def write_rest(self, function: ToolSchema) -> _Format:
        """Returns the format of a call after its opener, up to its tail."""
        tags = self.write_tags(function)
        begins = [tag["begin"].removeprefix(self._syntax.opener) for tag in tags]
        if not self._syntax.has_json_arguments:
            return _any_of(
                [tag | {"begin": begin} for tag, begin in zip(tags, begins, strict=True)]
            )
        tail = [_const(self._syntax.tail)] if self._syntax.tail else []
        return _sequence(_any_of([*map(_const, begins)]), tags[0]["content"], *tail)

    def write_tags(self, function: ToolSchema) -> list[_Format]:
        """Returns the format of a call for each text that it may begin with."""
        name = _escaped(function.name)
        begins = [head.replace("NAME", name) for head in self._syntax.heads]
        content: _Format = {"type": "any_text"}
        if self._syntax.has_json_arguments:
            content = self._schema(function.schema, function, "")
        end = self._syntax.tail
        return [{"type": "tag", "begin": begin, "content": content, "end": end} for begin in begins]

    def write_named_tags(self, function: ToolSchema) -> list[_Format]:
        """Returns the format of a call for each text up to the function's name that it may have."""
        rests: dict[str, list[str]] = {}
        for head in self._syntax.heads:
            begin, _, rest = head.partition('NAME"')
            rests.setdefault(begin, []).append(rest)
        schema = self._schema(function.schema, function, "")
        return [
            {
                "type": "tag",
                "begin": f'{begin}{_escaped(function.name)}"',
                "content": _sequence(_any_of([_const(text) for text in texts]), schema),
                "end": self._syntax.tail,
            }
            for begin, texts in rests.items()
        ]

    def tagged(self, form: _Format, *, is_compact: bool = False) -> StructuredOutputs:
        """Returns the structural tag of a format, which says whose schemas it has."""
        tag = {"type": "structural_tag", "format": form}
        text, parts = compact_json("tools", tag), []
        for pointer, schema in _schemas(tag, ""):
            if (owner := self._owners.get(id(schema))) is None:
                parts.append(SchemaPart(pointer=pointer, field=_FIELD, root=pointer))
            else:
                parts.append(owner[0].part(pointer + owner[1], pointer))
        return StructuredOutputs(
            structural_tag=text, disable_any_whitespace=is_compact, parts=parts
        )

    def _write_object(self, function: ToolSchema) -> _Format:
        """Returns the format of a call that is a JSON object, as the stated form may be: as a
        schema, since literal texts of a call would hide a form that begins in the same way.
        """
        calls = []
        for key in self._syntax.argument_keys:
            arguments = rebase(function.schema, "#", f"#/properties/{key}")
            properties = {"name": {"enum": [function.name]}, key: arguments}
            schema = {"type": "object", "properties": properties, "required": list(properties)}
            calls.append(self._schema(schema, function, f"/properties/{key}"))
        return _sequence(*_optional(self._syntax.prefixes), _any_of(calls))

    def _schema(self, schema: dict[str, Any], owner: ToolSchema, pointer: str) -> _Format:
        """Returns the format of a schema that has a tool's own at a JSON pointer."""
        self._owners[id(schema)] = owner, pointer
        return {"type": "json_schema", "json_schema": schema}


def _schemas(value: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yields the JSON schemas of a format, each with its JSON pointer."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _schemas(item, f"{pointer}/{index}")
    elif isinstance(value, dict):
        for name, item in value.items():
            if name == "json_schema":
                yield f"{pointer}/{name}", item
            else:
                yield from _schemas(item, f"{pointer}/{name}")


def _escaped(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _const(text: str) -> _Format:
    return {"type": "const_string", "value": text}


def _any_of(formats: Sequence[_Format]) -> _Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def _sequence(*formats: _Format) -> _Format:
    return formats[0] if len(formats) == 1 else {"type": "sequence", "elements": list(formats)}


def _optional(texts: Sequence[str]) -> list[_Format]:
    """Returns the format of one of some texts, or none; no format if there are none."""
    return [{"type": "optional", "content": _any_of([*map(_const, texts)])}] if texts else []
