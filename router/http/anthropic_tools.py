"""`tools` and `tool_choice` of Anthropic's API, as OpenAI's chat API writes them."""

from collections.abc import Mapping
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import compact_json
from router.http.fields import Fields

__all__ = ["allows_parallel_calls", "choice_of", "tools_of"]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def tools_of(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the tools of a body.

    Raises:
        InvalidArgumentError: a tool is malformed, or none of the client's own; names its path.
    """
    return [_tool(Fields(tool, f"tools[{i}]")) for i, tool in enumerate(tools or ())]


def choice_of(
    given: Mapping[str, Any] | None, tools: list[dict[str, Any]]
) -> str | dict[str, Any] | None:
    """Returns the choice of a body; None if it states none.

    Args:
        given: the body's `tool_choice`.
        tools: what `tools_of` returned.

    Raises:
        InvalidArgumentError: it is malformed, or names no tool; names its path.
    """
    if given is None:
        return None
    choice = Fields(given, "tool_choice")
    choice.required("type")
    kind = choice.choice("type", (*_CHOICES, "tool")) or ""
    if kind in ("any", "tool") and not tools:
        raise InvalidArgumentError(f"tool_choice.type is {kind!r}, but tools is empty")
    if kind != "tool":
        return _CHOICES[kind]
    name, names = choice.required_text("name"), [tool["function"]["name"] for tool in tools]
    if name not in names:
        limit = f"the name of one of tools: {', '.join(names)}"
        raise InvalidArgumentError.for_field("tool_choice.name", name, limit)
    return {"type": "function", "function": {"name": name}}


def allows_parallel_calls(given: Mapping[str, Any] | None) -> bool:
    """Whether the answer may have several calls.

    Args:
        given: the body's `tool_choice`.
    """
    return not Fields(given or {}, "tool_choice").boolean("disable_parallel_tool_use")


def _tool(tool: Fields) -> dict[str, Any]:
    kind = tool.text("type")
    if kind not in (None, "custom"):
        limit = "'custom' or unset; Baton has no built-in tools"
        raise InvalidArgumentError.for_field(tool.path_of("type"), kind, limit)
    schema = tool.required("input_schema")
    compact_json(tool.path_of("input_schema"), schema)
    function = {"name": tool.required_text("name"), "parameters": schema}
    if description := tool.text("description"):
        function["description"] = description
    if (is_strict := tool.boolean("strict")) is not None:
        function["strict"] = is_strict
    return {"type": "function", "function": function}
