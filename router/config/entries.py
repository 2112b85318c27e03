"""`read_entries`: configs from a YAML file with a list of mappings of flags to values."""

from typing import NoReturn, TypeVar

from typing_extensions import override

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.flags.parser import FlagParser
from baton.common.flags.sources import read_list

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
    parser = _EntryParser()
    add_flags(parser, config_class, "entry")
    found = []
    for i, values in enumerate(entries):
        try:
            found.append(config_from_args(config_class, parser.parse_given(values)))
        except ConfigurationError as error:
            raise ConfigurationError(f"{flag} {path}, entry {i}: {error.message}") from None
    return tuple(found)


class _EntryParser(FlagParser):
    """A parser of values in a file, which raises errors."""

    @override
    def error(self, message: str) -> NoReturn:
        """Raises a `ConfigurationError`."""
        raise ConfigurationError(message)
