"""Baton's packages beside `baton`: where they lie, and that no other package has taken their names.

A wheel has them in `baton/_packages`, so that no file of Baton's has the path of another
distribution's: Hugging Face's `kernels` is a package too (docs/adr/0090-releases.md). A line in
`baton_llm.pth` makes that folder the last one that Python searches, for processes that know nothing
of Baton. Once `baton` is imported, it is searched before the other installed packages.
"""

import sys
from collections.abc import MutableSequence
from importlib.util import find_spec
from pathlib import Path

from baton.common.errors import ConfigurationError

__all__ = ["PACKAGES", "add_to_path", "check_names", "folder_of_packages"]

PACKAGES = (
    "benchmarks",
    "decode_service",
    "engine",
    "kernels",
    "kvstore",
    "prefill_service",
    "router",
    "rpc",
    "worker",
)

_BATON = Path(__file__).parents[1]
_INSTALLED = _BATON / "_packages"


def add_to_path(
    path: MutableSequence[str] = sys.path,
    *,
    installed: Path = _INSTALLED,
    site: Path = _BATON.parent,
) -> None:
    """Puts the folder of an installed Baton before the folder of the installed packages.

    The folder of a script stays before both. A source tree has no such folder, and keeps its path.

    Args:
        path: is searched for modules.
        installed: the folder.
        site: the folder of the installed packages.
    """
    if installed.is_dir():
        own, others = str(installed), str(site)
        path.insert(path.index(others) if others in path else len(path), own)


def folder_of_packages() -> Path:
    """Returns the folder that holds them: of the installation, or the source tree."""
    return _INSTALLED if _INSTALLED.is_dir() else _BATON.parent


def check_names(folder: Path | None = None) -> None:
    """Refuses to go on if Python finds another package by one of these names.

    Args:
        folder: holds them; None for where `baton` was imported from.

    Raises:
        ConfigurationError: names the other package.
    """
    folder = folder or folder_of_packages()
    for name in PACKAGES:
        origin = _origin(name)
        if origin is None or not Path(origin).is_relative_to(folder):
            raise ConfigurationError(
                f"Baton's package {name!r} lies in {folder}, but this process finds {origin}: "
                "one process cannot have two packages of one name. Import baton before the other "
                "one, rename your own module, or run `baton serve` and use its HTTP API"
            )


def _origin(name: str) -> str | None:
    """Returns the file of a package that is loaded, or would be; None if it has none."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module that was made by hand has no specification
        return None
    return None if spec is None else spec.origin
