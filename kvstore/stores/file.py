"""`file:///path`: one file per object, shared by whoever mounts the folder.

`kvstore.stores.object_folder` says how objects lie there.
"""

from pathlib import Path
from typing import Self

from kvstore.store import StoreCapabilities
from kvstore.stores.folder_space import FolderSpace
from kvstore.stores.object_folder import ObjectFolder
from kvstore.stores.parts_store import PartsStore
from kvstore.stores.url import DEFAULT_TIMEOUT_S, DEFAULT_TTL_S, StoreUrl

__all__ = ["FileStore"]

_OPTIONS = ("ttl_s", "lease_s", "max_bytes", "timeout_s", "fsync")
_DEFAULT_MAX_BYTES = 16 << 30


class FileStore(PartsStore):
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
        parts = StoreUrl.parse(url, _OPTIONS)
        syncs = parts.choice("fsync", "never", "commit") == "commit"
        if parts.authority or not parts.path.strip("/"):
            raise parts.error("write file:///absolute/path")
        path = Path(parts.path)
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
                default_max_bytes=_DEFAULT_MAX_BYTES,
                timeout_s=timeout_s,
            )
        except OSError as error:
            raise parts.error(f"cannot use the folder {path}: {error.strerror}") from error
        folder = ObjectFolder(space, syncs=syncs)
        return cls(folder, ttl_s=ttl_s, lease_s=lease_s, timeout_s=timeout_s)
