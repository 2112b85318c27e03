"""Names the variables of the environment that look like Baton's and are not read by any command."""

import difflib
import os
from collections.abc import Iterator, Mapping

__all__ = ["unknown_variables"]

_PREFIX = "BATON_"
_NEGATED = f"{_PREFIX}NO_"
"""How `--no-NAME` would begin: a variable has the name of `--NAME`, and is on or off."""
_SERVICE_HOST = "_SERVICE_HOST"
_MIN_SIMILARITY = 0.7


def unknown_variables(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yields a warning, without the value, for each variable that has no effect.

    A variable is known if any command reads it, as one environment may be for several. Empty ones
    count as unset. Kubernetes makes variables for each service of a namespace; those of services
    named `baton...` are none of Baton's.
    """
    names = [name for name, text in environment.items() if name.startswith(_PREFIX) and text]
    if not names:
        return
    from baton.common.flags.variable_names import VARIABLE_NAMES  # seldom needed

    of_services = tuple(_variables_of_services(names))
    for name in sorted(set(names) - VARIABLE_NAMES):
        if not name.startswith(of_services):
            suggestion = _suggestion(name, VARIABLE_NAMES)
            yield f"the variable {name} is not read by any command{suggestion}"


def _variables_of_services(names: list[str]) -> Iterator[str]:
    """Yields how the variables begin that Kubernetes makes for services."""
    for name in names:
        if name.endswith(_SERVICE_HOST):
            service = name.removesuffix(_SERVICE_HOST)
            yield from (f"{service}_SERVICE_", f"{service}_PORT")


def _suggestion(name: str, known: frozenset[str]) -> str:
    switch = _PREFIX + name.removeprefix(_NEGATED)
    if name.startswith(_NEGATED) and switch in known:
        return f"; did you mean {switch}=off?"
    ends = [variable.removeprefix(_PREFIX) for variable in known]
    nearest = difflib.get_close_matches(name.removeprefix(_PREFIX), ends, 1, _MIN_SIMILARITY)
    return f"; did you mean {_PREFIX}{nearest[0]}?" if nearest else ""
