"""Structural tags: which parts of a text are constrained, and how."""

from collections.abc import Iterator
from typing import Any

from engine.constraints.interface import RefusedError

__all__ = ["schemas_of_tag", "tag_with_format", "tag_with_whitespace", "texts_of_tag"]


def tag_with_format(tag: dict[str, Any]) -> dict[str, Any]:
    """Returns a structural tag in the form that has a `format`.

    The older form has `structures`, a list of tags with begin, schema and end, and `triggers`.

    Raises:
        RefusedError: it has neither form.
    """
    if "structures" not in tag:
        if not isinstance(tag.get("format"), dict):
            raise RefusedError("it has neither format nor structures and triggers")
        return {"type": "structural_tag", **tag}
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise RefusedError("structures and triggers must be lists")
    tags = [
        {
            "type": "tag",
            "begin": _required_text(structure, "begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": _required_text(structure, "end"),
        }
        for structure in structures
    ]
    form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return {"type": "structural_tag", "format": form}


def schemas_of_tag(value: Any) -> Iterator[Any]:
    """Yields the JSON schemas in a structural tag that has a `format`."""
    if isinstance(value, list):
        for item in value:
            yield from schemas_of_tag(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name == "json_schema":
                yield item
            else:
                yield from schemas_of_tag(item)


def texts_of_tag(value: Any) -> Iterator[str]:
    """Yields the texts in a structural tag, without those of its JSON schemas."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_of_tag(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in ("json_schema", "schema"):
                yield from texts_of_tag(item)


def tag_with_whitespace(value: Any, max_whitespace: int) -> Any:
    """Returns a structural tag whose JSON has at most so many characters of whitespace between two
    tokens, unless it states a limit of its own.
    """
    if isinstance(value, list):
        return [tag_with_whitespace(item, max_whitespace) for item in value]
    if not isinstance(value, dict):
        return value
    limited = {
        name: item if name == "json_schema" else tag_with_whitespace(item, max_whitespace)
        for name, item in value.items()
    }
    if value.get("type") == "json_schema" and limited.get("max_whitespace_cnt") is None:
        limited["max_whitespace_cnt"] = max_whitespace
    return limited


def _required_text(structure: Any, name: str) -> str:
    text = structure.get(name) if isinstance(structure, dict) else None
    if not isinstance(text, str):
        raise RefusedError(f"each of structures needs a text {name}")
    return text
