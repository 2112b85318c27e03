"""The KV store of a one-machine cluster: needs no server, goes with the cluster."""

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["embedded_store"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the store makes a private folder there
_FOLDER_NAME = re.compile(r"baton-up-(\d+)-[0-9a-f]+")


@contextmanager
def embedded_store() -> Iterator[str]:
    """The URL of a KV store for processes of this machine, removed at the end.

    It lies in shared memory, or in a temporary folder where there is none.
    What clusters that were killed left in shared memory is removed too.
    """
    if os.access(_SHARED_MEMORY, os.W_OK):
        _remove_leftovers(_SHARED_MEMORY)
        name = f"up-{os.getpid()}-{secrets.token_hex(4)}"
        folder, url = _SHARED_MEMORY / f"baton-{name}", f"shm://{name}"
    else:
        folder = Path(tempfile.mkdtemp(prefix="baton-up-"))
        url = folder.as_uri()
    try:
        yield url
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
