"""Words for what the operating system refuses: what it is, and what to do about it."""

import errno
import os
import stat
from pathlib import Path

__all__ = ["NO_SPACE", "explain", "owner_advice"]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, or of a user who may not write more to it."""

_REMEDIES = {
    errno.ENOENT: "a folder is missing there: is its disk mounted?",
    errno.EDQUOT: "raise the quota, or set max_bytes to less than it",
    errno.EROFS: "mount it for writing; KV that is there can still be loaded",
    errno.ESTALE: "the file server exports another folder now: mount it again",
    errno.ENOTCONN: "the program behind the mount has ended: mount it again",
}
# A put that fails frees the inodes and bytes that it had taken: so many may be left after it.
_FEW_INODES = 64
_MUCH_BYTES = 1 << 20
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the kernel's name


def explain(error: OSError, folder: Path | None = None) -> str:
    """Returns a sentence on an error of the operating system, with a remedy if there is one.

    Args:
        error: the error.
        folder: where it happened, if the error does not name a file.
    """
    path = Path(error.filename) if isinstance(error.filename, str) else folder
    text = f"{error.strerror or error} ({path or 'write'})"
    if error.errno == errno.ENOSPC:
        return f"disk full: {_without_space(text, folder or path)}"
    if error.errno in (errno.EACCES, errno.EPERM) and path is not None:
        return f"{text}: {owner_advice(path)}"
    text = f"disk full: {text}" if error.errno == errno.EDQUOT else text
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{text}; {remedy}" if remedy else text


def owner_advice(path: Path) -> str:
    """Returns who owns a path, or the first folder above it that can be looked at, and who this
    process is, with what to do about it.
    """
    uid = os.getuid()
    status, nearest = _nearest_status(path)
    text = (
        f"{nearest} belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):03o}, "
        f"and this process has uid {uid}; give it the folder (chown), or run it as that user"
    )
    if uid == 0 and status.st_uid != 0:
        text += (
            ". A network file system that maps root to another user (root_squash) takes no files "
            "of root: run the process as an ordinary user"
        )
    return text


def _nearest_status(path: Path) -> tuple[os.stat_result, Path]:
    for ancestor in (path, *path.parents):
        try:
            return ancestor.stat(), ancestor
        except OSError:
            continue
    return Path("/").stat(), Path("/")


def _without_space(text: str, folder: Path | None) -> str:
    """Adds to a text whether inodes or bytes are lacking."""
    if folder is None:
        return text
    if _lacks_inodes(folder):
        return f"{text}; no inodes are left there: remove files"
    if folder.is_relative_to(_SHARED_MEMORY):
        return (
            f"{text}; free memory in {_SHARED_MEMORY}, or start the container with a larger "
            "--shm-size"
        )
    return f"{text}; free some space there"


def _lacks_inodes(folder: Path) -> bool:
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    is_short = status.f_favail < _FEW_INODES and status.f_bavail * status.f_frsize > _MUCH_BYTES
    return status.f_files > 0 and is_short
