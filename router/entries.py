"""`read_entries`: configs from a YAML file with a list of mappings of flags to values."""

from collections.abc import Mapping
from typing import NoReturn, TypeVar

from typing_extensions import override

from baton.errors import ConfigurationError
from baton.flag_parser import FlagParser
from baton.flag_sources import Given, read_list
from baton.flags import add_flags, config_from_args

__all__ = ["read_entries"]

_Config = TypeVar("_Config")


def read_entries(flag: str, path: str, config_class: type[_Config]) -> tuple[_Config, ...]:
    """Reads configs of a file.

    Args:
        flag: names the file in errors.
        path: the file.
        config_class: a dataclass whose fields are flags.

    Raises:
        ConfigurationError: the file cannot be read, or is not such a list; names the entry.
    """
    try:
        entries = read_list(path)
    except ValueError as error:
        raise ConfigurationError(f"{flag} {error}") from None
    return tuple(
        _entry(f"{flag} {path}, entry {i}", values, config_class)
        for i, values in enumerate(entries)
    )


def _entry(where: str, values: Mapping[str, Given], config_class: type[_Config]) -> _Config:
    parser = _EntryParser(prog=where)
    add_flags(parser, config_class, "entry")
    try:
        return config_from_args(config_class, parser.parse_given(values))
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error.message}") from None


class _EntryParser(FlagParser):
    """A parser of values in a file, which raises errors."""

    @override
    def error(self, message: str) -> NoReturn:
        """Raises a `ConfigurationError`."""
        raise ConfigurationError(message)
