"""`ShmStore`: the `KvStore` of `shm://NAME`."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from typing_extensions import override

from kvstore.store import KvObject, StoreCapabilities
from kvstore.stores.base import SharedStore
from kvstore.stores.files import is_private
from kvstore.stores.shm.arena import Arena
from kvstore.stores.shm.memory_ahead import MemoryAhead
from kvstore.url import LIMIT_OPTIONS, StoreLimits, StoreUrl, bound_in_memory, usable_folder

__all__ = ["LEAST_FREE_BYTES", "ShmStore"]

LEAST_FREE_BYTES = 16 << 20
"""What /dev/shm must have left for a new store whose URL names no `max_bytes`: it takes half."""

_REFUSED = {"fsync": "fsync has no meaning in memory; file:///path takes it"}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # a name in a folder has up to 255 bytes
_DEFAULT_MAX_BYTES = 4 << 30
_OVERHEAD_SHARE = 8
"""The index and memory that is allocated ahead take at most this part of the objects' bound."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the kernel's name; our folder in it is private


class ShmStore(SharedStore):
    """A store in the machine's shared memory, `/dev/shm/baton-NAME`; made by `from_url`."""

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

    @classmethod
    @override
    def from_url(cls, url: str) -> Self:
        """Opens `shm://NAME?ttl_s=&lease_s=&max_bytes=&timeout_s=`; NAME defaults to "default".

        Without `max_bytes` the bound is half of what /dev/shm has left, up to 4 GiB and a
        sixteenth of the container's memory limit.

        Raises:
            ConfigurationError: the name or an option is wrong; the machine has no /dev/shm, or it
                is too full; other users can access the store's folder, or another version made it.
        """
        parts = StoreUrl.parse(url, LIMIT_OPTIONS, _REFUSED)
        name = parts.authority or "default"
        if not _NAME.fullmatch(name) or parts.path.strip("/"):
            raise parts.error(
                "write shm://NAME, the name of up to 200 letters, digits, '.', '_' and '-'"
            )
        if not _SHARED_MEMORY.is_dir():
            raise parts.error(
                f"this machine has no {_SHARED_MEMORY}; use file:///path between processes, "
                "or memory:// within one"
            )
        folder = _SHARED_MEMORY / f"baton-{name}"
        limits = parts.limits(bound_in_memory(_DEFAULT_MAX_BYTES))
        if limits.max_bytes is None and not folder.exists():
            _check_free_memory(parts)
        with usable_folder(parts, folder):
            if not is_private(folder):
                raise parts.error(
                    f"{folder} is not a private folder of this user; choose another name"
                )
            return cls(Arena(folder, limits), limits)

    @classmethod
    @override
    def memory_bytes(cls, url: str) -> int:
        limits = StoreUrl.parse(url, LIMIT_OPTIONS, _REFUSED).limits(_DEFAULT_MAX_BYTES)
        max_bytes = limits.max_bytes or bound_in_memory(_DEFAULT_MAX_BYTES, _SHARED_MEMORY)
        return max_bytes + max_bytes // _OVERHEAD_SHARE

    @override
    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        super().put(keys, objects)
        self._ahead.request()

    @override
    def close(self) -> None:
        """Waits for memory that is being allocated and for the lock: a few times `timeout_s`."""
        self._ahead.close()
        super().close()


def _check_free_memory(url: StoreUrl) -> None:
    free_bytes = shutil.disk_usage(_SHARED_MEMORY).free
    if free_bytes < LEAST_FREE_BYTES:
        raise url.error(
            f"{_SHARED_MEMORY} has {free_bytes / 2**20:.1f} MiB left, and a store without "
            f"max_bytes needs {LEAST_FREE_BYTES / 2**20:.0f} MiB. Start the container with a "
            "larger --shm-size (Docker's default is 64m), add max_bytes=SIZE to the URL, or use "
            "another connector, such as file:///path or grpc://"
        )
