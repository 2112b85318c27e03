"""Command-line flags made from `EngineConfig`'s fields, and a config from parsed flags.

Torch-free, so that every command's `--help` is quick.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Collection
from typing import Any

from baton.errors import ConfigurationError
from engine.config import EngineConfig
from kvstore.handoff import connector_name
from kvstore.registry import connector_capabilities
from kvstore.url import parse_byte_size

__all__ = ["FIXED_FIELDS", "add_engine_args", "engine_config_from_args"]

FIXED_FIELDS = {
    "prefill": ("role", "kv_load_failure_policy", "kv_publish"),
    "decode": ("role",),
}
"""By role, the fields of `EngineConfig` that have no flag. A prefill engine publishes all prompts
and computes what it cannot load, so the last two mean nothing to it.
"""


def add_engine_args(parser: argparse.ArgumentParser, *, omit: Collection[str] = ()) -> None:
    """Adds one flag per `EngineConfig` field, with dashes for underscores.

    Args:
        parser: gets the flags, in a group of their own.
        omit: names of fields that get no flag; pass their values to
            `engine_config_from_args`.
    """
    group = parser.add_argument_group("engine")
    for field in dataclasses.fields(EngineConfig):
        if field.name not in omit:
            group.add_argument(f"--{field.name.replace('_', '-')}", **_argument_options(field))


def engine_config_from_args(args: argparse.Namespace, **overrides: Any) -> EngineConfig:
    """The config that parsed flags describe; `overrides` win over them.

    Only server processes have these flags; their connector must reach other processes.

    Raises:
        ConfigurationError: a value is out of range, or the connector is of one
            process only; names the flag.
    """
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    flags = {name: value for name, value in vars(args).items() if name in names}
    config = EngineConfig(**{**flags, **overrides})
    if config.kv_connector is not None:
        _check_shared(config.kv_connector)
    return config


def _check_shared(kv_connector: str) -> None:
    if not connector_capabilities(kv_connector).shared_between_processes:
        raise ConfigurationError(
            f"--kv-connector {connector_name(kv_connector)}:// is shared within one process only; "
            "between processes use shm://NAME, file:///path, redis://host:port/db, grpc:// or nixl://"
        )


def _argument_options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Keyword arguments of `add_argument` for one field."""
    options: dict[str, Any] = {"help": _help(field)}
    if field.default is dataclasses.MISSING:
        options["required"] = True
    else:
        options["default"] = field.default
    if _parser_of(field) is bool:
        options["action"] = argparse.BooleanOptionalAction
        return options
    options["type"] = _parser_of(field)
    if "choices" in field.metadata:
        options["choices"] = field.metadata["choices"]
    else:
        options["metavar"] = options["type"].__name__.removeprefix("_").upper()
    return options


def _help(field: dataclasses.Field[Any]) -> str:
    """The field's help text, with its default appended."""
    text: str = field.metadata["help"].replace("%", "%%")
    if field.default in (dataclasses.MISSING, None, ()):
        return text
    return f"{text} (default: %(default)s)"


def _parser_of(field: dataclasses.Field[Any]) -> Callable[[str], Any]:
    """The function that parses the flag's text into the field's type; `X | None` counts as X."""
    if field.metadata.get("parse") == "bytes":
        return _bytes
    if field.metadata.get("parse") == "names":
        return str  # `EngineConfig` splits it
    if not isinstance(field.type, types.UnionType):
        return typing.cast("Callable[[str], Any]", field.type)
    (parser,) = (member for member in typing.get_args(field.type) if member is not types.NoneType)
    return typing.cast("Callable[[str], Any]", parser)


def _bytes(text: str) -> int:
    try:
        return parse_byte_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
