"""`file:///path` and `shm://NAME`: one file per object, shared by processes.

Both are the same store on different folders; `kvstore.stores.object_folder`
says how objects lie there.
"""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvstore.store import Frame, GetStatus, KvStore, StoreCapabilities, StoreStats
from kvstore.stores.file_io import os_errors_as_unavailable, status_of
from kvstore.stores.folder_space import FolderSpace
from kvstore.stores.object_folder import ObjectFolder, Parts
from kvstore.stores.url import DEFAULT_TIMEOUT_S, DEFAULT_TTL_S, StoreUrl

__all__ = ["FileStore", "ShmStore"]

_OPTIONS = ("ttl_s", "lease_s", "max_bytes", "timeout_s")
_REFUSED_BY_SHM = {"fsync": "fsync has no meaning in memory; file:///path takes it"}
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the kernel's name; our folder in it is private


class _DirectoryStore(KvStore):
    """What both stores do, once the folder is chosen."""

    def __init__(self, folder: ObjectFolder, space: FolderSpace) -> None:
        self.ttl_s = space.ttl_s
        self.lease_s = space.lease_s
        self.timeout_s = space.timeout_s
        self._folder = folder
        self._space = space
        self._counters = space.counters
        self._is_closed = False

    @classmethod
    def _open(
        cls, parts: StoreUrl, path: Path, *, default_max_bytes: int, syncs: bool, recycles: bool
    ) -> Self:
        """Opens the folder at a path, made if absent, with the URL's options."""
        ttl_s = parts.seconds("ttl_s", DEFAULT_TTL_S)
        lease_s = parts.lease_seconds(ttl_s)
        timeout_s = parts.seconds("timeout_s", DEFAULT_TIMEOUT_S)
        max_bytes = parts.num_bytes("max_bytes")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            space = FolderSpace(
                path,
                ttl_s=ttl_s,
                lease_s=lease_s,
                max_bytes=max_bytes,
                default_max_bytes=default_max_bytes,
                timeout_s=timeout_s,
                recycles=recycles,
            )
        except OSError as error:
            raise parts.error(f"cannot use the folder {path}: {error.strerror}") from error
        return cls(ObjectFolder(space, syncs=syncs), space)

    def put_many(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """See `KvStore.put_many`."""
        self._put(keys, [(value,) for value in values])
        self._counters.count_puts(values)

    def put_frames(self, keys: Sequence[bytes], frames: Sequence[Frame]) -> None:
        """See `KvStore.put_frames`."""
        self._put(keys, frames)
        self._counters.count_puts(frames)

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[GetStatus]:
        """See `KvStore.get_many_into`."""
        statuses = self._get(keys, [(buffer,) for buffer in buffers])
        self._counters.count_gets(statuses, buffers)
        return statuses

    def get_frames_into(self, keys: Sequence[bytes], frames: Sequence[Frame]) -> list[GetStatus]:
        """See `KvStore.get_frames_into`."""
        statuses = self._get(keys, frames)
        self._counters.count_gets(statuses, frames)
        return statuses

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.contains_prefix`."""
        with os_errors_as_unavailable():
            missing = (i for i, key in enumerate(keys) if not self._folder.touch_if_alive(key))
            return next(missing, len(keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.delete`."""
        with os_errors_as_unavailable():
            return self._folder.remove(keys)

    def stats(self) -> StoreStats:
        """See `KvStore.stats`."""
        num_bytes = None if self._is_closed else self._space.num_bytes()
        return self._counters.snapshot(
            num_objects=None, num_bytes=num_bytes, oldest_age_s=self._space.oldest_age_s
        )

    def close(self) -> None:
        """See `KvStore.close`."""
        if not self._is_closed:
            self._is_closed = True
            self._space.close()

    def _put(self, keys: Sequence[bytes], values: Sequence[Parts]) -> None:
        with os_errors_as_unavailable():
            self._folder.put_many(keys, values)

    def _get(self, keys: Sequence[bytes], buffers: Sequence[Parts]) -> list[GetStatus]:
        with os_errors_as_unavailable():
            pairs = zip(keys, buffers, strict=True)
            return [self._folder.read_into(key, parts) for key, parts in pairs]


class FileStore(_DirectoryStore):
    """`file:///path`: objects on a disk."""

    capabilities = StoreCapabilities(
        shared_between_processes=True,
        shared_between_hosts=False,
        survives_restart=True,
        takes_max_bytes=True,
        keeps_leases=True,
        takes_frames=True,
    )

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Opens `file:///path?ttl_s=&lease_s=&max_bytes=&timeout_s=&fsync=`, making the folder
        if absent.

        `fsync` is "never" or "commit": then a put returns once its objects are on the disk.

        Raises:
            ConfigurationError: no absolute path; a bad option; an unusable folder.
        """
        parts = StoreUrl.parse(url, (*_OPTIONS, "fsync"))
        syncs = parts.choice("fsync", "never", "commit") == "commit"
        if parts.authority or not parts.path.strip("/"):
            raise parts.error("write file:///absolute/path")
        return cls._open(
            parts, Path(parts.path), default_max_bytes=16 << 30, syncs=syncs, recycles=False
        )


class ShmStore(_DirectoryStore):
    """`shm://NAME`: objects in the machine's shared memory, `/dev/shm/baton-NAME`."""

    capabilities = StoreCapabilities(
        shared_between_processes=True,
        shared_between_hosts=False,
        survives_restart=False,
        takes_max_bytes=True,
        keeps_leases=True,
        takes_frames=True,
    )

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Opens `shm://NAME?ttl_s=&lease_s=&max_bytes=&timeout_s=`; without a name it is "default".

        Raises:
            ConfigurationError: a bad name or option; a machine without
                `/dev/shm`; a folder that other users can read or write.
        """
        parts = StoreUrl.parse(url, _OPTIONS, _REFUSED_BY_SHM)
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
        return cls._open(parts, folder, default_max_bytes=4 << 30, syncs=False, recycles=True)


def _is_private_or_absent(folder: Path) -> bool:
    """Whether nobody but this user can have put anything there."""
    status = status_of(str(folder))
    return status is None or (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and stat.S_IMODE(status.st_mode) & 0o077 == 0
    )
