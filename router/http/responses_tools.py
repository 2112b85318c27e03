"""`tools` and `tool_choice` of OpenAI's Responses API, as its chat API writes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidArgumentError
from baton.json_text import compact_json
from router.http.fields import Fields, wrong_value

__all__ = ["Tools", "tools_of"]

_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a request.

    Attributes:
        tools: those that the model may call, as in the chat API.
        schema_fields: the fields of the body that have their schemas, for errors.
        choice: the choice of a tool, as in the chat API.
        echoed: all tools, as the answer repeats them.
        echoed_choice: the choice, as the answer repeats it.
    """

    tools: tuple[Mapping[str, Any], ...]
    schema_fields: tuple[str, ...]
    choice: str | Mapping[str, Any] | None
    echoed: list[Mapping[str, Any]]
    echoed_choice: str | Mapping[str, Any]


def tools_of(tools: list[dict[str, Any]] | None, given: str | dict[str, Any] | None) -> Tools:
    """Returns the tools of a body.

    Args:
        tools: the body's.
        given: the body's `tool_choice`.

    Raises:
        InvalidArgumentError: a tool is malformed or none of the client's functions, or the
            choice names none of them; names the path.
    """
    echoed = [_tool(Fields(tool, f"tools[{i}]")) for i, tool in enumerate(tools or ())]
    names = [tool["name"] for tool in echoed]
    choice: str | Mapping[str, Any] | None = given
    if isinstance(given, dict):
        choice, names = _choice_of(Fields(given, "tool_choice"), names)
    elif given is not None and given not in _CHOICES:
        raise wrong_value("tool_choice", given, f"one of {', '.join(_CHOICES)}, or an object")
    if choice == "required" and not names:
        raise InvalidArgumentError("tool_choice is 'required', but tools is empty")
    offered = {i: tool for i, tool in enumerate(echoed) if tool["name"] in names}
    return Tools(
        tools=tuple(map(_chat_tool, offered.values())),
        schema_fields=tuple(f"tools[{i}].parameters" for i in offered),
        choice=choice,
        echoed=list(echoed),
        echoed_choice=given or "auto",
    )


def _tool(tool: Fields) -> dict[str, Any]:
    """Returns a function as the answer repeats it."""
    kind = tool.required_text("type")
    if kind != "function":
        limit = "'function'; Baton has no built-in tools"
        raise wrong_value(tool.path_of("type"), kind, limit)
    parameters = tool.get("parameters")
    if parameters is not None:
        compact_json(tool.path_of("parameters"), parameters)
    return {
        "type": "function",
        "name": tool.required_text("name"),
        "description": tool.text("description"),
        "parameters": parameters,
        "strict": tool.boolean("strict"),
    }


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if value is not None}
    del function["type"]
    return {"type": "function", "function": function}


def _choice_of(choice: Fields, names: list[str]) -> tuple[str | Mapping[str, Any], list[str]]:
    """Returns the choice and the names of the tools that the model may call."""
    match choice.get("type"):
        case "function":
            name = _known_name(choice, names)
            return {"type": "function", "function": {"name": name}}, names
        case "allowed_tools":
            mode = choice.choice("mode", ("auto", "required")) or "auto"
            return mode, [_known_name(tool, names) for tool in choice.objects("tools")]
    limit = "one of function, allowed_tools; Baton has no built-in tools"
    raise wrong_value(choice.path_of("type"), choice.get("type"), limit)


def _known_name(choice: Fields, names: list[str]) -> str:
    name = choice.required_text("name")
    if name not in names:
        limit = f"the name of one of tools: {', '.join(names)}"
        raise wrong_value(choice.path_of("name"), name, limit)
    return name
