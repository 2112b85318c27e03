"""Structural tags: which parts of a text are constrained, and how; as grammars of llguidance."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.constraints.interface import RefusedError

__all__ = [
    "lark_of_tag",
    "schemas_of_tag",
    "tag_with_format",
    "tag_with_whitespace",
    "texts_of_tag",
]

_ANY_TEXT = "TEXT: /(.|\\n)*/"
_REPEATS = {"plus": "+", "star": "*", "optional": "?"}


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
            "begin": _text_of_structure(structure, "begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": _text_of_structure(structure, "end"),
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


def _text_of_structure(structure: Any, name: str) -> str:
    text = structure.get(name) if isinstance(structure, dict) else None
    if not isinstance(text, str):
        raise RefusedError(f"each of structures needs a text {name}")
    return text


def lark_of_tag(form: Any, schema_source: Callable[[Any], str]) -> str:
    """Returns the grammar of a structural tag's format, without options.

    Args:
        form: the format.
        schema_source: returns a JSON schema as Lark writes it.

    Raises:
        RefusedError: a part is malformed, or has no equal in Lark.
    """
    writer = _Writer(schema_source)
    start = writer.write(form)
    return "\n".join([f"start: {start}", *writer.rules, _ANY_TEXT])


class _Writer:
    """Writes formats as expressions, and the rules that they need."""

    def __init__(self, schema_source: Callable[[Any], str]) -> None:
        self._schema_source = schema_source
        self.rules: list[str] = []

    def write(self, form: Any) -> str:
        """Returns the expression of a format."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        match kind:
            case "const_string":
                return _literal(_required_text(form, "value"))
            case "json_schema" if form.get("style", "json") == "json":
                return self._schema_source(form.get("json_schema"))
            case "any_text" if not form.get("excludes"):
                return "TEXT"
            case "sequence":
                return f"({' '.join(self._write_all(form, 'elements'))})"
            case "or":
                return f"({' | '.join(self._write_all(form, 'elements'))})"
            case "plus" | "star" | "optional":
                return f"({self.write(form.get('content'))}){_REPEATS[kind]}"
            case "tag":
                return f"({_literal(_required_text(form, 'begin'))} {self._rest_of_tag(form)})"
            case "triggered_tags":
                return self._write_triggered(form)
        raise RefusedError(f"{str(kind)[:64]} in a structural tag")

    def _write_all(self, form: Mapping[str, Any], name: str) -> list[str]:
        parts = form.get(name)
        if not isinstance(parts, list) or not parts:
            raise RefusedError(f"a structural tag needs a list of {name}")
        return [self.write(part) for part in parts]

    def _rest_of_tag(self, tag: Mapping[str, Any]) -> str:
        """Returns the grammar of the text after the begin of a tag."""
        content, end = tag.get("content"), _required_text(tag, "end")
        is_text = isinstance(content, Mapping) and content == {"type": "any_text"}
        if is_text and end:
            return self._rule("[lazy]", f"TEXT {_literal(end)}")
        return f"{self.write(content)} {_literal(end)}"

    def _write_triggered(self, form: Mapping[str, Any]) -> str:
        """Returns text of any kind in which a tag follows each trigger."""
        triggers, tags = form.get("triggers"), form.get("tags")
        if not isinstance(triggers, list) or not all(
            isinstance(trigger, str) for trigger in triggers
        ):
            raise RefusedError("triggered_tags needs a list of triggers")
        if not isinstance(tags, list) or not tags or not all(map(_is_tag, tags)):
            raise RefusedError("triggered_tags needs a list of tags")
        if any(form.get(name) for name in form.keys() - {"type", "triggers", "tags"}):
            raise RefusedError("triggered_tags with other fields than triggers and tags")
        bodies: dict[str, list[str]] = {}
        for tag in tags:
            begin = _required_text(tag, "begin")
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if not trigger:
                raise RefusedError(f"the tag {begin!r}, which begins with none of the triggers")
            rest = _literal(begin.removeprefix(trigger))
            bodies.setdefault(trigger, []).append(f"{rest} {self._rest_of_tag(tag)}")
        parts = [
            f"{self._rule('[lazy]', f'TEXT {_literal(trigger)}')} ({' | '.join(rests)})"
            for trigger, rests in bodies.items()
        ]
        return f"({' | '.join(parts)})* {self._rule('', 'TEXT')}"

    def _rule(self, options: str, body: str) -> str:
        """Adds a rule and returns its name."""
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


def _is_tag(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type", "tag") == "tag"


def _required_text(form: Mapping[str, Any], name: str) -> str:
    text = form.get(name)
    if not isinstance(text, str):
        raise RefusedError(f"a structural tag whose {name} is not a text")
    return text


def _literal(text: str) -> str:
    """A text as a literal of Lark; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
