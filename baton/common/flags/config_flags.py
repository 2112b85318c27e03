"""Command-line flags of config dataclasses: one field is one flag.

A field made with `flag` carries its flag's help, parser and names. `add_flags` adds the flags of a
dataclass to a parser, `config_from_args` builds the dataclass from parsed flags, and
`flags_of_config` is the inverse. A command may have the flags of several dataclasses, each in a
group of its own. `baton.common.flags.parser` reads the same flags from the environment and from
a file.
"""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

from baton.common.errors import ConfigurationError
from baton.common.flags.values import (
    CollectTexts,
    byte_size,
    byte_size_with_unit,
    count,
    format_byte_size,
    gibibytes,
)

__all__ = [
    "FlagInfo",
    "add_flags",
    "config_from_args",
    "flag",
    "flag_choices",
    "flag_name",
    "flags_of_config",
]

Config = TypeVar("Config")
Parse = Callable[[str], Any]

_METADATA_KEY = "flag"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlagInfo:
    """The flag of a field.

    Attributes:
        help: its meaning; the default is appended.
        parse: turns the flag's text into a value, or raises `argparse.ArgumentTypeError`. None:
            the field's type, where `X | None` is X, and takes "none" too unless X is str.
        choices: the accepted values; empty for all.
        aliases: further names (one with a single dash starts with it), which work and are
            documented nowhere, each with its own parser or None for `parse`.
        metavar: stands for the value in the help; empty for a name made from the type.
        name: the flag without its dashes; empty for the field's name with dashes.
        is_main: whether the short help has the flag.
        is_positional: whether the command takes the value as its first argument, too.
        is_list: whether values stand beside each other, as in `--served-model-name a b`. A
            flag of a tuple always takes commas or a JSON list, and can be repeated.
    """

    help: str
    parse: Parse | None = None
    choices: Sequence[str] = ()
    aliases: Mapping[str, Parse | None] = dataclasses.field(default_factory=dict)
    metavar: str = ""
    name: str = ""
    is_main: bool = False
    is_positional: bool = False
    is_list: bool = False


def flag(default: Any, help_text: str, **options: Any) -> Any:
    """Returns a dataclass field with a flag.

    Args:
        default: the field's value without the flag; `dataclasses.MISSING` if it must be given.
        help_text: the flag's meaning.
        options: the other attributes of `FlagInfo`.
    """
    return dataclasses.field(
        default=default, metadata={_METADATA_KEY: FlagInfo(help=help_text, **options)}
    )


def flag_name(config_class: Any, field_name: str) -> str:
    """Returns a field's flag, with its dashes."""
    (name,) = (
        field.metadata[_METADATA_KEY].name
        for field in dataclasses.fields(config_class)
        if field.name == field_name
    )
    return f"--{name or field_name.replace('_', '-')}"


def flag_choices(field: "dataclasses.Field[Any]") -> Sequence[str]:
    """Returns the values that a field's flag accepts; empty for all."""
    metadata = field.metadata.get(_METADATA_KEY)
    return () if metadata is None else metadata.choices


def add_flags(
    parser: argparse.ArgumentParser,
    config_class: type[Any],
    group: str,
    *,
    omit: Collection[str] = (),
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
    helps: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
    """Adds the flags of a config dataclass, in a group of the help page.

    Args:
        parser: gets the flags.
        config_class: the dataclass. Fields that were not made with `flag` get no flag.
        group: the group's title; dataclasses may share a group.
        omit: names of fields that get no flag.
        defaults: by field, this command's default, where it differs from the class's.
        helps: by field, this command's help, where it differs.
    """
    groups = [action_group for action_group in parser._action_groups if action_group.title == group]
    section = groups[0] if groups else parser.add_argument_group(group)
    for field in _flag_fields(config_class):
        if field.name not in omit:
            default = defaults.get(field.name, field.default)
            action = _add_flag(parser, section, config_class, field, default)
            action.help = _help(field, default, helps.get(field.name))


def config_from_args(
    config_class: type[Config], args: argparse.Namespace, **overrides: Any
) -> Config:
    """Builds a config dataclass from parsed flags.

    Args:
        config_class: the dataclass.
        args: flags that a parser with `add_flags` parsed; other flags are not read.
        overrides: by field, values that win over flags.

    Raises:
        ConfigurationError: a value is missing or out of range; names the flag, and the
            environment variable or the file that the value comes from.
    """
    values, missing = dict(overrides), []
    for field in _flag_fields(config_class):
        if field.name in values:
            continue
        value = getattr(args, _destination(field), None)
        if value is None and field.default is dataclasses.MISSING:
            missing.append(flag_name(config_class, field.name))
        elif hasattr(args, _destination(field)):
            values[field.name] = value
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigurationError(f"{' and '.join(missing)} {verb} missing")
    try:
        return config_class(**values)
    except ConfigurationError as error:
        raise _with_origin(error, args) from None


def flags_of_config(config: Any, *, omit: Collection[str] = ()) -> list[str]:
    """Returns the flags that describe a config, without those at their class's defaults.

    A command that has other defaults (`add_flags`) needs these flags stated as well.
    """
    flags: list[str] = []
    for field in _flag_fields(type(config)):
        value = getattr(config, field.name)
        if field.name in omit or value == field.default:
            continue
        name = flag_name(config, field.name)
        if isinstance(value, bool):
            flags.append(name if value else f"--no-{name[2:]}")
        else:
            text = _format_value(field, value)
            # A text such as --end must not look like a flag.
            flags += [f"{name}={text}"] if text.startswith("-") else [name, text]
    return flags


_BYTE_PARSERS = (byte_size, byte_size_with_unit)
_METAVARS: dict[Any, str] = {
    **dict.fromkeys(_BYTE_PARSERS, "BYTES"),
    gibibytes: "GIB",
    count: "N",
    int: "N",
    float: "X",
    str: "TEXT",
}


def _flag_fields(config_class: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(config_class) if _METADATA_KEY in field.metadata]


def _destination(field: dataclasses.Field[Any]) -> str:
    name: str = field.metadata[_METADATA_KEY].name
    return name.replace("-", "_") or field.name


def _add_flag(
    parser: argparse.ArgumentParser,
    section: Any,
    config_class: Any,
    field: dataclasses.Field[Any],
    default: Any,
) -> argparse.Action:
    """Adds one field's flag, its silent aliases and its positional form; returns the first."""
    metadata: FlagInfo = field.metadata[_METADATA_KEY]
    name, dest = flag_name(config_class, field.name), _destination(field)
    is_missing = default is dataclasses.MISSING
    options = _argument_options(field, typing.get_type_hints(config_class)[field.name])
    action: Any = section.add_argument(
        name, dest=dest, default=None if is_missing else default, **options
    )
    action.is_main = metadata.is_main or (is_missing and not metadata.is_positional)
    action.is_needed = is_missing
    hidden = {"dest": dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for alias, parse in metadata.aliases.items():
        parser.add_argument(
            alias if alias.startswith("-") else f"--{alias}",
            **{**options, **hidden, **({"type": parse} if parse else {})},
        )
    if metadata.is_positional:
        shown = "" if is_missing or default is None else f" (default: {default})"
        parser.add_argument(
            dest,
            nargs="?",
            default=argparse.SUPPRESS,
            metavar=name[2:].upper(),
            help=f"{metadata.help} (also {name}){shown}".replace("%", "%%"),
        )
    return cast("argparse.Action", action)


def _argument_options(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Returns keyword arguments of `add_argument` for a field of type `hint`."""
    metadata: FlagInfo = field.metadata[_METADATA_KEY]
    members = [member for member in typing.get_args(hint) if member is not types.NoneType]
    is_optional = isinstance(hint, types.UnionType) and len(members) == 1
    kind = members[0] if is_optional else hint
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    options: dict[str, Any] = {"metavar": metadata.metavar or None}
    if metadata.choices:
        return options | {"choices": metadata.choices}
    if metadata.parse is None and typing.get_origin(kind) is not None:
        several = {"action": CollectTexts, "metavar": metadata.metavar or "NAME"}
        return several | ({"nargs": "+"} if metadata.is_list else {})
    parse = metadata.parse or kind
    options["metavar"] = metadata.metavar or _METAVARS.get(parse, "VALUE")
    options["type"] = _or_none(parse) if is_optional and kind is not str else parse
    return options


def _or_none(parse: Parse) -> Parse:
    """Returns a parser that takes "none", too."""

    def parse_or_none(text: str) -> Any:
        return None if text.strip().lower() == "none" else parse(text)

    parse_or_none.__name__ = parse.__name__  # argparse names the type of a bad value by it
    return parse_or_none


def _help(field: dataclasses.Field[Any], default: Any, other_text: str | None) -> str:
    """Returns the flag's help text, or another one, with its default."""
    text: str = (other_text or field.metadata[_METADATA_KEY].help).replace("%", "%%")
    if default is dataclasses.MISSING or default in (None, (), ""):
        return text
    shown = _format_value(field, default).replace("%", "%%")
    return f"{text} (default: {shown})"


def _format_value(field: dataclasses.Field[Any], value: Any) -> str:
    """Returns the text that the flag's parser turns into `value`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        return json.dumps(list(value)) if "," in "".join(value) else ",".join(value)
    if value is None:
        return "none"
    if field.metadata[_METADATA_KEY].parse in _BYTE_PARSERS:
        return format_byte_size(value)
    return str(value)


def _with_origin(error: ConfigurationError, args: argparse.Namespace) -> ConfigurationError:
    """Returns the error with the origin of the value, if that is not the command line."""
    origins: Mapping[str, str] = getattr(args, "flag_origins", {})
    name = error.message.partition(" ")[0].removeprefix("--").replace("-", "_")
    return (
        ConfigurationError(f"{error.message} (from {origins[name]})") if name in origins else error
    )
