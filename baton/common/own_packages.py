"""Baton's packages beside `baton`: where they lie, and that no other package has taken their names.

A wheel has them in `baton/_packages`, so that no file of Baton's has the path of another
distribution's: Hugging Face's `kernels` is a package too (docs/adr/0090-releases.md). A line in
`baton_llm.pth` makes that folder the last one that Python searches, for processes that know nothing
of Baton; an editable installation adds the source tree there. Once `baton` is imported, the folder
is searched before all installed packages.
"""

import site
import sys
from collections.abc import Container, MutableSequence
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
    folder: Path | None = None,
    installed: Container[str] | None = None,
) -> None:
    """Lets Python find Baton's packages before those that are installed.

    The folders of a script and of PYTHONPATH stay before both.

    Args:
        path: is searched for modules.
        folder: holds the packages; None for where `baton` was imported from.
        installed: the folders of installed packages; None for those of this Python.
    """
    own = str(folder or folder_of_packages())
    installed = _folders_of_installed() if installed is None else installed
    first = next((i for i, entry in enumerate(path) if entry in installed), len(path))
    if own not in path[:first]:
        path.insert(first, own)


def folder_of_packages() -> Path:
    """Returns the folder that holds them: of the installation, or the source tree."""
    return _INSTALLED if _INSTALLED.is_dir() else _BATON.parent


def _folders_of_installed() -> set[str]:
    """Returns the folders into which packages are installed: of all users, of one, and Baton's."""
    folders = {*site.getsitepackages(), site.getusersitepackages()}
    return folders | ({str(_BATON.parent)} if _INSTALLED.is_dir() else set())


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
