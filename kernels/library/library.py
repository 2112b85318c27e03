"""Chooses and loads the library of native CPU kernels.

The default is the best variant that the CPU supports and that was built. `BATON_CPU_KERNELS`
names another variant, torch, or the GPU's kernels in Triton's interpreter. A library is never
loaded on a CPU that lacks its instructions, nor if its sources have changed since it was built.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from baton.common.errors import ConfigurationError
from kernels.library.cpu import cpu_features
from kernels.library.variants import (
    BUILD_COMMAND,
    VARIANTS,
    Variant,
    fingerprint_sources,
    library_path,
    read_record,
    variants_for,
)

__all__ = [
    "TORCH",
    "TRITON",
    "WISH_VARIABLE",
    "Library",
    "Selection",
    "choose",
    "find_libraries",
    "load",
    "select",
]

WISH_VARIABLE = "BATON_CPU_KERNELS"
TORCH = "torch"
TRITON = "triton"
INTERPRET_VARIABLE = "TRITON_INTERPRET"
_AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Library:
    """A variant of this machine's architecture, and the state of its library.

    Attributes:
        variant: the instruction set.
        path: of its library, whether it exists or not.
        built: whether the library exists.
        stale: whether the library was built from other sources than those beside it.
        problem: why it was not built, if the build recorded a reason.
    """

    variant: Variant
    path: Path
    built: bool
    stale: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernels that serve the CPU.

    Attributes:
        variant: a variant's name, "torch" for the slower fallback, or "triton" for the GPU's
            kernels in Triton's interpreter, which is very slow and meant for trying them.
        path: the library; None for torch and triton.
        reason: why these kernels were chosen, as text for users.
    """

    variant: str
    path: Path | None
    reason: str


@functools.cache
def load() -> ctypes.CDLL | None:
    """Loads the library of `select()`, once per process; returns None for torch and triton.

    Raises:
        ConfigurationError: as in `select`, or the system cannot load the library.
    """
    selection = select()
    if selection.path is None:
        return None
    try:
        return ctypes.CDLL(str(selection.path))
    except OSError as error:
        raise ConfigurationError(
            f"the native CPU kernels cannot be loaded: {error}; build them on this machine with "
            f"`{BUILD_COMMAND}`, or set {WISH_VARIABLE}={TORCH}"
        ) from error


def select() -> Selection:
    """Chooses the kernels that serve this machine's CPU.

    Raises:
        ConfigurationError: `BATON_CPU_KERNELS` names a variant that is unknown, was not built or
            does not run on this CPU; or the library is older than its sources.
    """
    wish = os.environ.get(WISH_VARIABLE) or _AUTO
    return choose(find_libraries(), cpu_features(), wish)


def find_libraries() -> list[Library]:
    """Returns the variants of this machine's architecture, the fastest first."""
    sources = fingerprint_sources()
    libraries = []
    for variant in variants_for():
        path, record = library_path(variant.name), read_record(variant.name)
        libraries.append(
            Library(
                variant,
                path,
                built=path.exists(),
                stale=record is None or record.sources != sources,
                problem=record.problem if record else "",
            )
        )
    return libraries


def choose(libraries: Sequence[Library], features: frozenset[str], wish: str) -> Selection:
    """Chooses among libraries.

    Args:
        libraries: the variants of the machine's architecture, the fastest first.
        features: of the CPU, by their names in /proc/cpuinfo.
        wish: "auto", "torch", "triton" or a variant's name.

    Raises:
        ConfigurationError: see `select`.
    """
    if wish == TORCH:
        return Selection(TORCH, None, _forced_by(TORCH))
    if wish == TRITON:
        if os.environ.get(INTERPRET_VARIABLE) != "1" or find_spec("triton") is None:
            raise ConfigurationError(
                f"{_forced_setting(wish)}: on a CPU that needs {INTERPRET_VARIABLE}=1 and "
                f"`pip install triton`"
            )
        return Selection(TRITON, None, _forced_by(TRITON))
    if wish != _AUTO:
        return _forced(libraries, features, wish)
    suitable = [library for library in libraries if library.variant.cpu_features <= features]
    for library in suitable:
        if library.built:
            return _selection(library, _reason(library, suitable, libraries))
    return Selection(TORCH, None, _reason_for_torch(suitable, libraries))


def _forced(libraries: Sequence[Library], features: frozenset[str], wish: str) -> Selection:
    names = [library.variant.name for library in libraries]
    if wish not in names:
        known = {variant.name for variant in VARIANTS} | {*names}
        limit = f"it must be one of {', '.join((_AUTO, TORCH, TRITON, *names))}"
        if wish in known:
            limit = f"this machine has another architecture; {limit}"
        raise ConfigurationError(f"{_forced_setting(wish)}: {limit}")
    library = libraries[names.index(wish)]
    lacking = sorted(library.variant.cpu_features - features)
    if lacking:
        raise ConfigurationError(f"{_forced_setting(wish)}: this CPU lacks {', '.join(lacking)}")
    if not library.built:
        raise ConfigurationError(
            f"{_forced_setting(wish)}: its library was not built"
            f"{_because(library)}; run `{BUILD_COMMAND}`"
        )
    return _selection(library, _forced_by(wish))


def _selection(library: Library, reason: str) -> Selection:
    """Refuses a stale library, which may not agree with the Python code on the arguments."""
    if library.stale:
        raise ConfigurationError(
            f"{library.path} was built from other sources than lie beside it; run "
            f"`{BUILD_COMMAND}`, or set {WISH_VARIABLE}={TORCH}"
        )
    return Selection(library.variant.name, library.path, reason)


def _reason(chosen: Library, suitable: Sequence[Library], libraries: Sequence[Library]) -> str:
    name = chosen.variant.name
    missed = suitable[: list(suitable).index(chosen)]
    if missed:
        better = missed[0]
        return (
            f"this CPU has {better.variant.name}, but its library was not built"
            f"{_because(better)}; {name} is the next best"
        )
    if chosen.variant.cpu_features:
        return f"this CPU has {name}"
    lacking = [library.variant.name for library in libraries if library not in suitable]
    if lacking:
        return f"this CPU has none of {', '.join(lacking)}"
    return "every CPU of this architecture runs it"


def _reason_for_torch(suitable: Sequence[Library], libraries: Sequence[Library]) -> str:
    built = [library.variant.name for library in libraries if library.built]
    if built:
        return f"this CPU does not run what was built ({', '.join(built)}); run `{BUILD_COMMAND}`"
    return (
        f"no library was built{_because(suitable[0])}: install a C++ compiler and run "
        f"`{BUILD_COMMAND}`"
    )


def _because(library: Library) -> str:
    return f" ({library.problem})" if library.problem else ""


def _forced_setting(wish: str) -> str:
    return f"{WISH_VARIABLE} is {wish!r}"


def _forced_by(wish: str) -> str:
    return f"forced by {WISH_VARIABLE}={wish}"
