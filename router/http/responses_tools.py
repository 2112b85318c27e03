"""`tools` and `tool_choice` of OpenAI's Responses API, as its chat API writes them.

The model is offered the client's own functions and custom tools, also those in namespaces. What a
server would have to run (web search, files, code, MCP) cannot be offered; it is left out while
the model may do without it.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import compact_json
from router.http.fields import Fields

__all__ = ["INPUT", "ClientTool", "Tools", "model_name", "tools_of"]

_LOGGER = logging.getLogger("baton.http")

INPUT = "input"
"""The argument of the function that stands for a custom tool."""
_CHOICES = ("none", "auto", "required")
_HOSTED = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_preview",
    }
)
"""Types of tools that Baton cannot offer, without the dates that some have."""
_DATE = re.compile(r"_\d{4}_\d{2}_\d{2}$")
_OWN = "one of function, custom, namespace; Baton has no built-in tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    """A tool that the model may call.

    Attributes:
        name: the client's name of it.
        namespace: the namespace that it is in; None: none.
        is_custom: whether calls have a text and no arguments.
        function: what the chat API says of it, with the name that the model reads.
        schema_field: the field of the body that has its schema, for errors.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False
    function: Mapping[str, Any]
    schema_field: str

    @property
    def model_name(self) -> str:
        """The name that the model reads."""
        return model_name(self.name, self.namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a request.

    Attributes:
        tools: those that the model may call, as in the chat API.
        by_name: those of the client, by the names that the model reads.
        schema_fields: the fields of the body that have their schemas, for errors.
        choice: the choice of a tool, as in the chat API.
        echoed: all tools, as the answer repeats them.
        echoed_choice: the choice, as the answer repeats it.
    """

    tools: tuple[Mapping[str, Any], ...]
    by_name: Mapping[str, ClientTool]
    schema_fields: tuple[str, ...]
    choice: str | Mapping[str, Any] | None
    echoed: list[Mapping[str, Any]]
    echoed_choice: str | Mapping[str, Any]


def model_name(name: str, namespace: str | None) -> str:
    """The name that the model reads of a tool in a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def tools_of(
    tools: list[dict[str, Any]] | None,
    given: str | dict[str, Any] | None,
    request_id: str = "",
) -> Tools:
    """Returns the tools of a body.

    Args:
        tools: the body's.
        given: the body's `tool_choice`.
        request_id: names the request in the log.

    Raises:
        InvalidArgumentError: a tool is malformed or of an unknown type, or the choice names none
            that can be offered; names the path.
    """
    fields = [Fields(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    by_name = {tool.model_name: tool for entry in fields for tool in _client_tools(entry)}
    names = set(by_name)
    choice: str | Mapping[str, Any] | None = given
    if isinstance(given, dict):
        choice, names = _choice_of(Fields(given, "tool_choice"), by_name)
    elif given is not None and given not in _CHOICES:
        raise InvalidArgumentError.for_field(
            "tool_choice", given, f"one of {', '.join(_CHOICES)}, or an object"
        )
    if choice == "required" and not names:
        lack = "has no tool that Baton can offer" if fields else "is empty"
        raise InvalidArgumentError(f"tool_choice is 'required', but tools {lack}")
    _log_hosted(fields, request_id)
    offered = [tool for name, tool in by_name.items() if name in names]
    return Tools(
        tools=tuple({"type": "function", "function": tool.function} for tool in offered),
        schema_fields=tuple(tool.schema_field for tool in offered),
        by_name=by_name,
        choice=choice,
        echoed=[_echoed(entry) for entry in fields],
        echoed_choice=given or "auto",
    )


def _client_tools(tool: Fields) -> Iterator[ClientTool]:
    """Yields what the model can be offered of an entry: nothing of one that a server would run."""
    match tool.required_text("type"):
        case "function" | "custom":
            yield _client_tool(tool, None)
        case "namespace":
            namespace = tool.required_text("name")
            tool.required("tools")
            for entry in tool.objects("tools"):
                entry.required("type")
                entry.choice("type", ("function", "custom"))
                yield _client_tool(entry, namespace)
        case kind if not _is_hosted(kind):
            raise InvalidArgumentError.for_field(tool.path_of("type"), kind, _OWN)


def _client_tool(tool: Fields, namespace: str | None) -> ClientTool:
    name, is_custom = tool.required_text("name"), tool.get("type") == "custom"
    function = _custom_function(tool) if is_custom else _function(tool)
    function["name"] = model_name(name, namespace)
    return ClientTool(
        name=name,
        namespace=namespace,
        is_custom=is_custom,
        function=function,
        schema_field=tool.path if is_custom else tool.path_of("parameters"),
    )


def _function(tool: Fields) -> dict[str, Any]:
    parameters = tool.get("parameters")
    if parameters is not None:
        compact_json(tool.path_of("parameters"), parameters)
    function = {
        "name": "",
        "description": tool.text("description"),
        "parameters": parameters,
        "strict": tool.boolean("strict"),
    }
    return {name: value for name, value in function.items() if value is not None}


def _custom_function(tool: Fields) -> dict[str, Any]:
    """A function with one text. The model reads the grammar of the text; nothing enforces it."""
    description = tool.text("description") or ""
    form = tool.object("format")
    if form is not None and form.choice("type", ("text", "grammar")) == "grammar":
        syntax, grammar = form.required_text("syntax"), form.required_text("definition")
        description += f"\n\n{INPUT} must match this grammar ({syntax}):\n{grammar}"
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {"name": "", "description": description.lstrip(), "parameters": parameters}


def _echoed(tool: Fields) -> Mapping[str, Any]:
    """A tool as the answer repeats it; functions have all their fields."""
    if tool.get("type") != "function":
        return tool.raw
    names = ("type", "name", "description", "parameters", "strict")
    return {name: tool.get(name) for name in names}


def _is_hosted(kind: str) -> bool:
    return _DATE.sub("", kind) in _HOSTED


def _log_hosted(tools: list[Fields], request_id: str) -> None:
    hosted = sorted({str(tool.get("type")) for tool in tools if _is_hosted(str(tool.get("type")))})
    if hosted:
        _LOGGER.info(
            "left out tools that a server would run types=%s request_id=%s",
            ",".join(hosted),
            ascii(request_id),
        )


def _choice_of(
    choice: Fields, by_name: Mapping[str, ClientTool]
) -> tuple[str | Mapping[str, Any], set[str]]:
    """Returns the choice and the names of the tools that the model may call."""
    qualified = defaultdict[str, list[str]](list)
    for name, tool in by_name.items():
        qualified[tool.name].append(name)
    match choice.get("type"):
        case "function" | "custom":
            name = _known_name(choice, by_name, qualified)
            return {"type": "function", "function": {"name": name}}, set(by_name)
        case "allowed_tools":
            mode = choice.choice("mode", ("auto", "required")) or "auto"
            allowed = {
                _known_name(entry, by_name, qualified)
                for entry in choice.objects("tools")
                if not _is_hosted(str(entry.get("type")))
            }
            return mode, allowed
    limit = "one of function, custom, allowed_tools; Baton has no built-in tools"
    raise InvalidArgumentError.for_field(choice.path_of("type"), choice.get("type"), limit)


def _known_name(
    choice: Fields, by_name: Mapping[str, ClientTool], qualified: Mapping[str, list[str]]
) -> str:
    """The model's name of a tool, which a choice may name by the client's name, too.

    Args:
        choice: names a tool.
        by_name: the tools.
        qualified: the model's names of the tools that have one name of the client's.
    """
    name = choice.required_text("name")
    model = model_name(name, choice.text("namespace"))
    if model in by_name:
        return model
    names = qualified.get(name, ())
    if len(names) != 1:
        limit = f"the name of one of tools: {', '.join(by_name)}"
        raise InvalidArgumentError.for_field(choice.path_of("name"), name, limit)
    return names[0]
