"""`file:///path`: one file per object, shared by whoever mounts the folder.

`kvstore.stores.file.object_folder` says how objects lie there.
"""

from pathlib import Path
from typing import Self

from kvstore.store import StoreCapabilities
from kvstore.stores.base import SharedStore
from kvstore.stores.file.folder_space import FolderSpace
from kvstore.stores.file.object_folder import ObjectFolder
from kvstore.url import LIMIT_OPTIONS, StoreUrl, usable_folder

__all__ = ["FileStore"]

_DEFAULT_MAX_BYTES = 16 << 30


class FileStore(SharedStore):
    """`file:///path`: objects on a disk."""

    capabilities = StoreCapabilities(
        shared_between_processes=True,
        shared_between_hosts=False,
        survives_restart=True,
        takes_max_bytes=True,
        keeps_leases=True,
    )

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Opens `file:///path?ttl_s=&lease_s=&max_bytes=&timeout_s=&fsync=`, making the folder
        if absent.

        `fsync` is "never" or "commit": then a put returns once its objects are on the disk.

        Raises:
            ConfigurationError: no absolute path; a bad option; an unusable folder.
        """
        parts = StoreUrl.parse(url, (*LIMIT_OPTIONS, "fsync"))
        syncs = parts.choice("fsync", "never", "commit") == "commit"
        if parts.authority or not parts.path.strip("/"):
            raise parts.error("write file:///absolute/path")
        limits = parts.limits(_DEFAULT_MAX_BYTES)
        with usable_folder(parts, Path(parts.path)) as path:
            space = FolderSpace(path, limits)
        return cls(ObjectFolder(space, syncs=syncs), limits)
