"""Content as a text or as parts: what a template reads, and how messages are brought into it.

Some templates write `message.content` as it is, others loop over its parts. As in vLLM, a template
that has a loop over the content of a message gets parts, and any other gets text. The results of
tools are always text.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes

__all__ = ["reads_parts", "shape_messages"]

_TOOL_ROLES = ("tool", "function")


def reads_parts(template: nodes.Template) -> bool:
    """Whether a parsed template loops over the parts of a message's content."""
    lists = _aliases(template, "messages")
    loops = list(template.find_all(nodes.For))
    messages = {
        name
        for loop in loops
        if any(_reads(loop.iter, name) for name in lists)
        for name in _target_names(loop.target)
    }
    return any(_reads(loop.iter, name, "content") for loop in loops for name in messages)


def _aliases(template: nodes.Template, variable: str) -> set[str]:
    """`variable` and all variables that it, or a slice of it, is assigned to."""
    assignments = list(template.find_all(nodes.Assign))
    found: set[str] = set()
    new = {variable}
    while new:
        found |= new
        new = {
            name
            for assignment in assignments
            if any(_reads(assignment.node, known) for known in found)
            for name in _target_names(assignment.target)
        } - found
    return found


def _target_names(target: nodes.Node) -> Iterator[str]:
    if isinstance(target, nodes.Name):
        yield target.name


def _reads(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Whether an expression is a variable, or a key of it, perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _reads_name(node.node, variable)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == key) and _reads_name(node.node, variable)
    return False


def _reads_name(node: nodes.Node, variable: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable


def shape_messages(
    messages: Sequence[Mapping[str, Any]], *, as_parts: bool, has_developer: bool
) -> list[dict[str, Any]]:
    """Returns messages with the form of content and the roles that a template knows.

    Args:
        messages: messages whose content is a text, None, or a list of text parts.
        as_parts: the template reads parts; otherwise parts become one text, a line break between
            two of them.
        has_developer: the template knows the role "developer"; otherwise it becomes "system".
    """
    shaped = []
    for message in messages:
        role = message.get("role")
        if role == "developer" and not has_developer:
            role = "system"
        shape = _parts_of if as_parts and role not in _TOOL_ROLES else _text_of
        shaped.append({**message, "role": role, "content": shape(message.get("content"))})
    return shaped


def _parts_of(content: Any) -> list[Any]:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text_of(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
