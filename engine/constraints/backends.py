"""Which grammar backends are installed, and which of them compiles a constraint."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from baton.common.errors import ConfigurationError, InvalidArgumentError
from baton.common.request.structured_outputs import StructuredOutputs
from engine.config import GRAMMAR_BACKENDS
from engine.constraints.hints import change_hints, relax_schema, schemas_of_parts
from engine.constraints.interface import MAX_WHITESPACE, Backend, RefusedError
from engine.constraints.vocabulary import Vocabulary

__all__ = ["Compiled", "check_installed", "compile_with", "installed_backends", "load_backend"]

_INSTALL = "pip install xgrammar llguidance"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled constraint.

    Attributes:
        backend: the name of the backend that compiled it, and can load it.
        data: the grammar.
    """

    backend: str
    data: bytes


@cache
def installed_backends() -> tuple[str, ...]:
    """Returns the names of the backends that can be imported; looks for them once."""
    return tuple(name for name in GRAMMAR_BACKENDS if importlib.util.find_spec(name) is not None)


def check_installed(choice: str) -> None:
    """Refuses a choice of backend that cannot be served.

    Args:
        choice: a backend's name, or "auto", which needs any of them.

    Raises:
        ConfigurationError: names the command that installs it.
    """
    installed = installed_backends()
    if not installed or choice not in ("auto", *installed):
        missing = " or ".join(GRAMMAR_BACKENDS) if choice == "auto" else choice
        raise ConfigurationError(
            f"structured outputs need {missing}, which is not installed; run: {_INSTALL}"
        )


def load_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Imports a backend and gives it the token table, which takes up to seconds."""
    if name == "xgrammar":
        from engine.constraints.xgrammar import XGrammarBackend

        return XGrammarBackend(vocabulary)
    from engine.constraints.llguidance import LLGuidanceBackend

    return LLGuidanceBackend(vocabulary)


def compile_with(
    backends: Mapping[str, Backend],
    choice: str,
    outputs: StructuredOutputs,
    max_whitespace: int | None = MAX_WHITESPACE,
) -> Compiled:
    """Compiles a constraint with the first backend that enforces all of it.

    Args:
        backends: those that are loaded, by name.
        choice: a backend's name, or "auto".
        outputs: the constraint.
        max_whitespace: as for `Backend.compile`.

    Raises:
        InvalidArgumentError: no backend does; has the reason of each.
    """
    names = _candidates(backends, choice, outputs)
    reasons = []
    for name in names:
        try:
            return Compiled(name, backends[name].compile(outputs, max_whitespace))
        except RefusedError as error:
            reasons.append(f"{error} ({name})")
    _check_parts(backends, names, outputs)
    if any(part.is_hint for part in outputs.parts):
        return _compile_relaxed(backends, names, outputs, max_whitespace)
    raise InvalidArgumentError(f"{outputs.client_field} is not supported: {'; '.join(reasons)}")


def _compile_relaxed(
    backends: Mapping[str, Backend],
    names: Sequence[str],
    outputs: StructuredOutputs,
    max_whitespace: int | None,
) -> Compiled:
    """Compiles a constraint without what a backend does not enforce of its hints.

    Raises:
        InvalidArgumentError: no backend compiles it; has the reason of each.
    """
    reasons = []
    for name in reversed(names):  # llguidance enforces more
        backend = backends[name]
        relaxed = change_hints(outputs, partial(relax_schema, check=backend.check))
        try:
            return Compiled(name, backend.compile(relaxed, max_whitespace))
        except RefusedError as error:
            reasons.append(f"{error} ({name})")
    raise InvalidArgumentError(f"{outputs.client_field} is not supported: {'; '.join(reasons)}")


def _check_parts(
    backends: Mapping[str, Backend], names: Sequence[str], outputs: StructuredOutputs
) -> None:
    """Refuses a part that is no hint and that no backend enforces, by the client's field."""
    for part, schema in schemas_of_parts(outputs):
        if part.is_hint:
            continue
        reasons = []
        for name in names:
            try:
                backends[name].check(schema)
                break
            except RefusedError as error:
                reasons.append(f"{error} ({name})")
        else:
            raise InvalidArgumentError(f"{part.field} is not supported: {'; '.join(reasons)}")


def _candidates(
    backends: Mapping[str, Backend], choice: str, outputs: StructuredOutputs
) -> list[str]:
    if choice != "auto":
        return [choice]
    is_lark = outputs.grammar is not None and "::=" not in outputs.grammar
    order = reversed(GRAMMAR_BACKENDS) if is_lark else GRAMMAR_BACKENDS
    return [name for name in order if name in backends]
