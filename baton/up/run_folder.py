"""Folders of a one-machine cluster, which go with it.

The folder by which a one-machine cluster's workers compute in turn; it goes with the cluster.

The KV store of a one-machine cluster: needs no server, goes with the cluster.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from baton.up.cluster import ClusterConfig

__all__ = ["SHARED_MEMORY", "embedded_store", "run_folder", "taking_turns"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - folders there are private
_FOLDER_NAME = re.compile(r"baton-up-(\d+)-\w+")


@contextmanager
def run_folder(least_free_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty folder for processes of this user and machine, which is removed at the end.

    It lies in shared memory if that can be written and has so many bytes left, otherwise among
    temporary files. Folders that killed clusters left there are removed first.
    """
    parent = Path(tempfile.gettempdir())
    if os.access(SHARED_MEMORY, os.W_OK):
        _remove_leftovers(SHARED_MEMORY)
        if shutil.disk_usage(SHARED_MEMORY).free >= least_free_bytes:
            parent = SHARED_MEMORY
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


@contextmanager
def taking_turns(config: ClusterConfig) -> Iterator[ClusterConfig]:
    """The config, with a folder for turns where several workers may compute on the CPU.

    `--device auto` may be a GPU: workers on one have no use for the folder.
    """
    num_workers = config.num_prefill + config.num_decode
    if num_workers == 1 or config.engine.device not in ("auto", "cpu"):
        yield config
        return
    with run_folder() as folder:
        yield replace(config, engine=replace(config.engine, turns_folder=str(folder)))


@contextmanager
def embedded_store() -> Iterator[str]:
    """Yields the URL of a KV store for processes of this machine, which is removed at the end.

    The store lies in shared memory, or in a temporary folder if shared memory has too little left.
    """
    from kvstore.stores.shm.store import LEAST_FREE_BYTES  # brings numpy, which plans do without

    with run_folder(LEAST_FREE_BYTES) as folder:
        is_shared = folder.parent == SHARED_MEMORY
        yield f"shm://{folder.name.removeprefix('baton-')}" if is_shared else folder.as_uri()
