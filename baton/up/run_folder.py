"""Folders of a one-machine cluster, which go with it."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["SHARED_MEMORY", "run_folder"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - folders there are private
_FOLDER_NAME = re.compile(r"baton-up-(\d+)-\w+")


@contextmanager
def run_folder() -> Iterator[Path]:
    """An empty folder for processes of this user and machine, removed at the end.

    It lies in shared memory, or among temporary files where there is none.
    What clusters that were killed left there is removed too.
    """
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    _remove_leftovers(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"baton-up-{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob("baton-up-*"):
        match = _FOLDER_NAME.fullmatch(folder.name)
        if match and not _is_alive(int(match[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
