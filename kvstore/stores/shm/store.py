"""`ShmStore`: the `KvStore` of `shm://NAME`."""

import re
import shutil
from pathlib import Path
from typing import Self

from typing_extensions import override

from kvstore.store import StoreCapabilities, StoreUnavailableError
from kvstore.stores.base import SharedStore, StoreCounters
from kvstore.stores.folders import MadeFolders, why_not_private
from kvstore.stores.shm.arena import Arena
from kvstore.url import LIMIT_OPTIONS, StoreLimits, StoreUrl, bound_in_memory

__all__ = ["MIN_FREE_BYTES", "ShmStore"]

MIN_FREE_BYTES = 16 << 20
"""What /dev/shm must have left for a new store whose URL names no `max_bytes`: it takes half."""

_REFUSED = {"fsync": "fsync has no meaning in memory; file:///path takes it"}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # a name in a folder has up to 255 bytes
_DEFAULT_MAX_BYTES = 4 << 30
_OVERHEAD_SHARE = 8
"""The index and spare memory take at most this part of the objects' bound."""
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

    @classmethod
    @override
    def _from_url(cls, url: str, *, is_diagnosis: bool) -> Self:
        """Opens `shm://NAME?ttl_s=&lease_s=&max_bytes=&timeout_s=`; NAME defaults to "default".

        Without `max_bytes` the bound is half of what /dev/shm has left, up to 4 GiB and a
        sixteenth of the container's memory limit.

        Raises:
            ConfigurationError: the name or an option is wrong; the machine has no /dev/shm.
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
        default_max_bytes = bound_in_memory(_DEFAULT_MAX_BYTES)
        limits = parts.limits(default_max_bytes, is_diagnosis=is_diagnosis)
        return cls(lambda counters: _open_arena(folder, limits, counters), parts, folder, limits)

    @classmethod
    @override
    def memory_bytes(cls, url: str) -> int:
        limits = StoreUrl.parse(url, LIMIT_OPTIONS, _REFUSED).limits(_DEFAULT_MAX_BYTES)
        max_bytes = limits.max_bytes or bound_in_memory(_DEFAULT_MAX_BYTES, _SHARED_MEMORY)
        return max_bytes + max_bytes // _OVERHEAD_SHARE


class _DiagnosedArena(Arena):
    """The arena of a diagnosis: it removes the folder if it has made it.

    Args:
        made: the folder, if it was absent.
        folder: see `Arena`.
        limits: see `Arena`.
    """

    def __init__(self, made: MadeFolders, folder: Path, limits: StoreLimits) -> None:
        super().__init__(folder, limits)
        self._made = made

    @override
    def close(self) -> None:
        super().close()
        for folder in self._made.made:
            shutil.rmtree(folder, ignore_errors=True)


def _open_arena(folder: Path, limits: StoreLimits, counters: StoreCounters) -> Arena:
    """Opens the objects in a folder, which it makes if it is absent.

    Raises:
        OSError: the operating system refuses.
        StoreUnavailableError: there is no room for a new store; other users can access the folder,
            or another version made it.
    """
    if limits.max_bytes is None and not folder.exists():
        _check_free_memory()
    made = MadeFolders()
    made.make(folder)
    if reason := why_not_private(folder):
        raise StoreUnavailableError(reason)
    if limits.is_diagnosis:
        return _DiagnosedArena(made, folder, limits)
    return Arena(folder, limits, counters)


def _check_free_memory() -> None:
    free_bytes = shutil.disk_usage(_SHARED_MEMORY).free
    if free_bytes < MIN_FREE_BYTES:
        raise StoreUnavailableError(
            f"{_SHARED_MEMORY} has {free_bytes / 2**20:.1f} MiB left, and a store without "
            f"max_bytes needs {MIN_FREE_BYTES / 2**20:.0f} MiB. Start the container with a "
            "larger --shm-size (Docker's default is 64m), add max_bytes=SIZE to the URL, or use "
            "another connector, such as file:///path or grpc://"
        )
