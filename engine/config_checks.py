"""Checks of a configuration's values by the names of its fields. Pure."""

import math
import os
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag_choices

__all__ = [
    "bad_flag",
    "check_choices",
    "check_folder",
    "check_not_negative",
    "check_positive",
    "check_seconds",
]


def check_choices(config: Any) -> None:
    """Refuses values that their flags do not accept."""
    for field in fields(config):
        choices, value = flag_choices(field), getattr(config, field.name)
        if choices and value not in choices:
            raise bad_flag(field.name, value, f"one of {', '.join(choices)}")


def check_positive(config: object, names: Collection[str]) -> None:
    """Refuses numbers less than 1; None is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise bad_flag(name, value, ">= 1")


def check_not_negative(config: object, names: Collection[str]) -> None:
    """Refuses numbers less than 0; None is accepted."""
    for name in names:
        if (getattr(config, name) or 0) < 0:
            raise bad_flag(name, getattr(config, name), ">= 0")


def check_seconds(config: object, names: Collection[str]) -> None:
    """Refuses durations that are not positive, or not finite."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise bad_flag(name, getattr(config, name), "> 0 and finite")


def check_folder(name: str, path: str | None) -> None:
    """Refuses a path that is no folder, or that this process may not write to."""
    if path is None or (path and os.access(path, os.W_OK | os.X_OK) and Path(path).is_dir()):
        return
    raise bad_flag(name, path, "an existing folder that this process may write to")


def bad_flag(name: str, value: object, limit: str) -> ConfigurationError:
    """Returns the error for a field's value."""
    return ConfigurationError(f"--{name.replace('_', '-')} is {value!r}; it must be {limit}")
