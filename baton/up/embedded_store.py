"""The KV store of a one-machine cluster: needs no server, goes with the cluster."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.up.run_folder import SHARED_MEMORY, run_folder

__all__ = ["embedded_store"]


@contextmanager
def embedded_store() -> Iterator[str]:
    """The URL of a KV store for processes of this machine, removed at the end."""
    with run_folder() as folder:
        is_shared = folder.parent == SHARED_MEMORY
        yield f"shm://{folder.name.removeprefix('baton-')}" if is_shared else folder.as_uri()
