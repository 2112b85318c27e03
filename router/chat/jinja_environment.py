"""The Jinja environment of chat templates, and the plain copies of clients' data that they get.

Templates come with checkpoints, so they run in Jinja's sandbox and cannot change their input.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import MAX_JSON_DEPTH

__all__ = ["RefusedByTemplateError", "build_environment", "plain_copy"]

_MAX_PATH_CHARS = 200

_Path = tuple["_Path | None", str | int]
"""A place in the data: the place around it, and the key or index there. Its text is made for an
error only: a client can choose long keys.
"""


def plain_copy(field: str, value: Any) -> Any:
    """Returns a copy of JSON data in plain types, which a template may read safely.

    Objects of other types could have methods that Jinja's sandbox does not know.

    Args:
        field: names the data in errors.
        value: JSON data; any mapping is an object, lists and tuples are arrays.

    Raises:
        InvalidArgumentError: a value is not JSON data, a text has a lone surrogate, or the data
            nests too deeply; names the field by its path.
    """
    return _copy((None, field), value, MAX_JSON_DEPTH)


def _copy(path: _Path, value: Any, depth: int) -> Any:
    """Copies a value; at most `depth` levels of objects and arrays may follow."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return _copy_text(path, value)
    if isinstance(value, int | float):  # a subclass, such as an enum
        return float(value) if isinstance(value, float) else int(value)
    if not isinstance(value, Mapping | list | tuple):
        raise _error(path, f"must be JSON data, not {type(value).__name__}")
    if depth == 0:
        raise _error(path, f"nests too deeply; at most {MAX_JSON_DEPTH} levels are allowed")
    if isinstance(value, Mapping):
        return {
            _copy_key(path, key): _copy((path, key), item, depth - 1) for key, item in value.items()
        }
    return [_copy((path, i), item, depth - 1) for i, item in enumerate(value)]


def _copy_key(path: _Path, key: Any) -> str:
    if not isinstance(key, str):
        raise _error(path, f"has a key that is a {type(key).__name__}; keys must be texts")
    return _copy_text((path, key), key)


def _copy_text(path: _Path, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _error(
            path, f"is not valid Unicode: lone surrogate at character {error.start}"
        ) from None
    return str.__str__(text)


def _error(path: _Path, reason: str) -> InvalidArgumentError:
    keys = []
    place: _Path | None = path
    while place is not None:
        place, key = place
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key[:_MAX_PATH_CHARS]}")
    name = "".join(reversed(keys)).removeprefix(".")[:_MAX_PATH_CHARS]
    # A client's key may have surrogates itself.
    return InvalidArgumentError(f"{name.encode(errors='replace').decode()} {reason}")


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
