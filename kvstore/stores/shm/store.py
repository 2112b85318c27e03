"""`ShmStore`: the `KvStore` of `shm://NAME`."""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from typing_extensions import override

from kvstore.store import KvObject, StoreCapabilities
from kvstore.stores.base import SharedStore
from kvstore.stores.files import status_of
from kvstore.stores.shm.arena import Arena
from kvstore.stores.shm.memory_ahead import MemoryAhead
from kvstore.url import LIMIT_OPTIONS, StoreLimits, StoreUrl, usable_folder

__all__ = ["ShmStore"]

_REFUSED = {"fsync": "fsync has no meaning in memory; file:///path takes it"}
_DEFAULT_MAX_BYTES = 4 << 30
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the kernel's name; our folder in it is private


class ShmStore(SharedStore):
    """`shm://NAME`: objects in the machine's shared memory, `/dev/shm/baton-NAME`."""

    capabilities = StoreCapabilities(
        shared_between_processes=True,
        shared_between_hosts=False,
        survives_restart=False,
        takes_max_bytes=True,
        keeps_leases=True,
    )

    _objects: Arena

    def __init__(self, arena: Arena, limits: StoreLimits) -> None:
        super().__init__(arena, limits)
        self._ahead = MemoryAhead(arena)

    def close(self) -> None:
        """See `KvStore.close`. Waits for what is being made ready, and for the lock, some times
        `timeout_s` at most.
        """
        self._ahead.close()
        super().close()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Opens `shm://NAME?ttl_s=&lease_s=&max_bytes=&timeout_s=`; without a name it is "default".

        Raises:
            ConfigurationError: a bad name or option; a machine without `/dev/shm`; a folder
                that other users can read or write, or that another version made.
        """
        parts = StoreUrl.parse(url, LIMIT_OPTIONS, _REFUSED)
        name = parts.authority or "default"
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or parts.path.strip("/"):
            raise parts.error("write shm://NAME, the name of letters, digits, '.', '_' and '-'")
        if not _SHARED_MEMORY.is_dir():
            raise parts.error(
                f"this machine has no {_SHARED_MEMORY}; use file:///path between processes, "
                "or memory:// within one"
            )
        folder = _SHARED_MEMORY / f"baton-{name}"
        if not _is_private_or_absent(folder):
            raise parts.error(f"{folder} is not a private folder of this user; choose another name")
        limits = parts.limits(_DEFAULT_MAX_BYTES)
        with usable_folder(parts, folder):
            return cls(Arena(folder, limits), limits)

    @override
    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        super().put(keys, objects)
        self._ahead.ask()


def _is_private_or_absent(folder: Path) -> bool:
    """Whether nobody but this user can have put anything there."""
    status = status_of(str(folder))
    return status is None or (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and stat.S_IMODE(status.st_mode) & 0o077 == 0
    )
