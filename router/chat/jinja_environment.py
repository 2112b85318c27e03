"""The Jinja environment of chat templates: that of `transformers`, which templates are written for.

Templates come with checkpoints, so they run in Jinja's sandbox and cannot change their input.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["RefusedByTemplateError", "build_environment"]


class RefusedByTemplateError(jinja2.TemplateError):
    """The template called `raise_exception`; the message is the template's."""


def build_environment() -> jinja2.Environment:
    """Returns a new environment with the filters, functions and tags of `transformers`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _DictFunction()
    environment.globals["namespace"] = _PublicNamespace
    return environment


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the text of an answer for training.

    Its body is rendered as it is, in a scope of its own, as in `transformers`.
    """

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it as an attribute of instances

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        return str(caller())


class _DictFunction:
    """`dict(...)` and `dict.fromkeys(...)`; the type itself would give access to its methods."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PublicNamespace(Namespace):
    """`namespace(...)` whose attributes have no underscore in front: these reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Positional, as in Jinja: `self` may be the name of an attribute.
        instance, *initial = args
        attributes = dict(*initial, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(instance, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot have the attribute {name!r}: it starts with an underscore"
        )


def _raise_exception(message: Any) -> NoReturn:
    raise RefusedByTemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text; Jinja's own filter of this name escapes characters of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
