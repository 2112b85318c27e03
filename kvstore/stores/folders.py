"""The folder of a store: making it, its owner, and the random text that identifies the store."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from kvstore.stores.refusals import owner_advice

__all__ = ["MadeFolders", "folder_identity", "why_not_private"]

_NO_FOLDER = (errno.ELOOP, errno.ENOTDIR)
_NAME = "identity"
_NUM_BYTES = 16
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class MadeFolders:
    """Makes folders, and knows which of them were absent before.

    Attributes:
        made: folders that it has made, each after those around it.
    """

    def __init__(self) -> None:
        self.made: list[Path] = []

    def make(self, folder: Path) -> None:
        """Makes a folder if it is absent, and those around it, private to this user.

        Raises:
            OSError: it cannot be made, or something there is no folder.
        """
        absent = [folder]
        while not absent[-1].parent.exists():
            absent.append(absent[-1].parent)
        for missing in reversed(absent):
            try:
                missing.mkdir(mode=0o700)
            except FileExistsError:
                continue  # whoever uses it finds out whether it is a folder
            self.made.append(missing)

    def remove(self) -> None:
        """Removes those that it has made and that are empty."""
        while self.made:
            with suppress(OSError):
                self.made.pop().rmdir()


def why_not_private(folder: Path, *, shares_group: bool = False) -> str:
    """Returns why another user can have put something into a folder; empty if none can.

    The question is to be asked after the folder was made, since another user may make it before.
    The answer stays true: no other user can replace a folder of this user in, say, /dev/shm.

    Args:
        folder: the folder, which exists; a link to one is not private.
        shares_group: whether members of a group of this process may have done so, too, in a folder
            that they can write to, such as a volume in Kubernetes.

    Raises:
        OSError: the folder cannot be opened for another reason than its owner or its kind.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FOLDER:
            return f"{folder} is a file or a link, and no folder; choose another path"
        if error.errno == errno.EACCES:
            return f"{folder} cannot be read: {owner_advice(folder)}"
        raise
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    return _why_shared(folder, status, shares_group=shares_group)


def _why_shared(folder: Path, status: os.stat_result, *, shares_group: bool) -> str:
    is_own = status.st_uid == os.getuid()
    if not shares_group:
        if is_own and not status.st_mode & 0o077:
            return ""
        return f"{folder} is not a private folder of this user; choose another name"
    if status.st_mode & stat.S_IWOTH:
        return (
            f"all may write to {folder}; take that right away (chmod o-w), or choose another path"
        )
    is_of_group = status.st_mode & stat.S_IWGRP and status.st_gid in {os.getgid(), *os.getgroups()}
    if is_own or is_of_group:
        return ""
    return f"{folder} belongs to another user: {owner_advice(folder)}"


def folder_identity(folder: Path) -> str:
    """Returns the identity of a store's folder. Who first asks writes it.

    Empty for a folder that has none and cannot be written to.

    Raises:
        OSError: the folder does not exist, or cannot be read.
    """
    if not (identity := _read(folder)):
        with suppress(FileExistsError):
            try:
                _write(folder)
            except OSError as error:
                if error.errno not in _UNWRITABLE:
                    raise
        identity = _read(folder)
    return identity


def _read(folder: Path) -> str:
    try:
        text = (folder / _NAME).read_bytes()[: 2 * _NUM_BYTES].decode("ascii", "replace")
    except FileNotFoundError:
        return ""
    return text if len(text) == 2 * _NUM_BYTES else ""


def _write(folder: Path) -> None:
    """Writes an identity unless there is one, so that no process reads a part of it.

    Raises:
        OSError: the folder cannot be written to, or another process was first.
    """
    new = folder / f"{_NAME}-{secrets.token_hex(_NUM_BYTES)}"
    try:
        with new.open("x") as file:
            file.write(secrets.token_hex(_NUM_BYTES))
        new.chmod(0o640)
        try:
            (folder / _NAME).hardlink_to(new)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            new.rename(folder / _NAME)
    finally:
        with suppress(OSError):
            new.unlink()
