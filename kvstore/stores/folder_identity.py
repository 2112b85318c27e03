"""`folder_identity`: a random text in a folder, which identifies the store there."""

import errno
import secrets
from contextlib import suppress
from pathlib import Path

__all__ = ["folder_identity"]

_NAME = "identity"
_NUM_BYTES = 16
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


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
