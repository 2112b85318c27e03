"""Plug-ins: classes that other packages offer by entry points, or that a flag names.

A leaf module; the engine and the router use it.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from baton.common.errors import ConfigurationError

__all__ = ["load_plugin"]

_NONE: Mapping[str, Any] = MappingProxyType({})


def load_plugin(
    name: str, base: type[Any], flag: str, group: str, built_in: Mapping[str, type[Any]] = _NONE
) -> type[Any]:
    """Imports a class.

    Args:
        name: a key of `built_in`, the name of an entry point, or `module:Class`.
        base: what the class must be derived from.
        flag: names the class; for errors.
        group: of the entry points.
        built_in: classes that come with Baton, by name.

    Raises:
        ConfigurationError: the name is unknown, or is of no such class that can be imported.
    """
    if name in built_in:
        return built_in[name]
    try:
        loaded = _import(name, flag, group, built_in)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{flag}: {name!r} cannot be imported: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigurationError(f"{flag}: {name!r} is no {base.__name__} class")
    return loaded


def _import(name: str, flag: str, group: str, built_in: Mapping[str, Any]) -> Any:
    module_name, colon, class_name = name.partition(":")
    if colon:
        return getattr(import_module(module_name), class_name)
    for point in entry_points(group=group, name=name):
        return point.load()
    names = {*built_in, *(point.name for point in entry_points(group=group))}
    raise ConfigurationError(
        f"{flag}: unknown name {name!r}; installed are {', '.join(sorted(names)) or 'none'}; "
        "or give one as module:Class"
    )
