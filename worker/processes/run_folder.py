"""Temporary folders of processes that run together on this machine, removed with them.

One folder holds the default KV store, which needs no server. Another holds what workers on the CPU
share: their weights (`engine/runtime/weights/shared_weights.py`) and the lock files by which they
take turns (`engine/runtime/turns.py`). A third one holds the cluster's token.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from baton.common.security import config as security_config
from baton.common.security.cluster import ClusterSecurity
from engine.config import EngineConfig

__all__ = ["SHARED_MEMORY", "embedded_store", "new_token", "run_folder", "sharing_machine"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes private folders
_PREFIX = "baton-up-"


@contextmanager
def run_folder(least_free_bytes: int = 0) -> Iterator[Path]:
    """Makes an empty folder for processes of this user and machine; removes it at the end.

    The folder lies in shared memory if that can be written and has `least_free_bytes` left, else
    among the temporary files. Folders left there by killed clusters are removed too. A cluster
    locks its folders: containers may share a folder and yet not see each other's processes.
    """
    parent = Path(tempfile.gettempdir())
    if os.access(SHARED_MEMORY, os.W_OK):
        _remove_leftovers(SHARED_MEMORY)
        if shutil.disk_usage(SHARED_MEMORY).free >= least_free_bytes:
            parent = SHARED_MEMORY
    _remove_leftovers(parent)
    folder, lock = _make_locked(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make_locked(parent: Path) -> tuple[Path, int]:
    """Makes a folder; returns it and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        lock = _lock(folder)
        if lock is not None:
            return folder, lock
        # Another process took it for a leftover, before it was locked.


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it belongs to another user
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Locks a folder until the descriptor that it returns is closed; None if another process has
    locked or removed it.

    Raises:
        OSError: the folder cannot be opened, or its file system has no locks.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with ExitStack() as unlocked:
        unlocked.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not folder.exists():
            return None
        unlocked.pop_all()
    return descriptor


@contextmanager
def sharing_machine(engine: EngineConfig, *, turns: bool) -> Iterator[EngineConfig]:
    """Yields the config of workers with a folder through which they share weights and, if they are
    several, take turns. A folder that the config has already is kept.

    `--device auto` may choose a GPU; workers on a GPU do not use the folder.

    Args:
        engine: the workers' config.
        turns: whether they take turns.
    """
    if engine.device not in ("auto", "cpu"):
        yield engine
        return
    with run_folder() as folder:
        own_folder = str(folder)
        yield replace(
            engine,
            weights_folder=engine.weights_folder or own_folder,
            turns_folder=engine.turns_folder or (own_folder if turns else None),
        )


@contextmanager
def new_token() -> Iterator[tuple[str, str]]:
    """Yields a new token of a cluster, and the path of its file, which only this user may read."""
    with run_folder() as folder:
        path = str(folder / "token")
        token = ClusterSecurity(security_config.CredentialsConfig(token_file=path)).token
        assert token is not None
        yield token, path


@contextmanager
def embedded_store() -> Iterator[str]:
    """Yields the URL of a KV store for processes of this machine; removes the store at the end.

    The store lies in shared memory, or in a temporary folder if shared memory has too little left.
    """
    from kvstore.stores.shm.store import MIN_FREE_BYTES  # here, as it imports numpy

    with run_folder(MIN_FREE_BYTES) as folder:
        is_shared = folder.parent == SHARED_MEMORY
        yield f"shm://{folder.name.removeprefix('baton-')}" if is_shared else folder.as_uri()
