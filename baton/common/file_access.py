"""Opens the files of a model, and says why one that is there cannot be read.

A file that is absent is often no error: most of them are optional. One that is there and cannot be
read is one, as a model would be served without it: a file of another user, or a link whose target
was not mounted. A leaf module that router and workers share.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from baton.common.errors import ConfigurationError

__all__ = [
    "UnreadableFileError",
    "find_files",
    "has_file",
    "missing_files_error",
    "read_text",
    "reason_of",
    "unreadable",
]

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_HUB_BLOBS = "blobs"
"""The folder of the Hub's cache whose files a snapshot links to."""


class UnreadableFileError(ConfigurationError):
    """A file or folder is there, and this process cannot read it."""


def has_file(path: Path) -> bool:
    """Whether there is a file at a path, which this process can read.

    Returns:
        False if nothing is there.

    Raises:
        UnreadableFileError: something is there that cannot be read, such as a file of another
            user or a link to nothing; names it and the reason.
    """
    with _opened(path) as file:
        return file is not None


def read_text(path: Path) -> str | None:
    """Returns the text of a file in UTF-8; None if there is no such file.

    Raises:
        UnreadableFileError: as `has_file`.
        UnicodeDecodeError: it is no UTF-8 text.
    """
    with _opened(path) as file:
        try:
            return None if file is None else file.read()
        except OSError as error:
            raise unreadable(path, error) from error


@contextmanager
def _opened(path: Path) -> Iterator[TextIO | None]:
    """Opens a file while the context lasts; None if nothing is there. Raises as `has_file`."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _ABSENT or _is_link(path):
            raise unreadable(path, error) from error
        yield None
        return
    except ValueError:  # a zero byte
        yield None
        return
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise UnreadableFileError(f"cannot read {path}: it is no file")
    with os.fdopen(number, encoding="utf-8") as file:
        yield file


def find_files(folder: Path, pattern: str) -> list[Path]:
    """Returns the files of a folder with names such as `*.bin`, sorted; nothing if it is absent.

    Raises:
        UnreadableFileError: this process cannot list the folder.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.match(pattern))
    except OSError as error:
        if error.errno not in _ABSENT:
            raise unreadable(folder, error) from error
        return []


def missing_files_error(folder: Path, problem: str) -> ConfigurationError:
    """Returns the error about a model's folder without what it needs."""
    note = "; the folder is empty: a container engine makes one if it does not find what to mount"
    return ConfigurationError(f"{folder} {problem}{'' if find_files(folder, '*') else note}")


def unreadable(path: Path, error: OSError) -> UnreadableFileError:
    """Returns the error about a path that is there and cannot be read."""
    if error.errno in _ABSENT and _is_link(path):
        reason = _describe_link(path)
    elif error.errno in _FORBIDDEN:
        reason = f"{reason_of(error)}; {_describe_obstacle(path)}"
    else:
        reason = reason_of(error)
    return UnreadableFileError(f"cannot read {path}: {reason}")


def reason_of(error: OSError) -> str:
    """Returns why the system refuses a path; a lack of permission with the user who lacks it."""
    if error.errno in _FORBIDDEN:
        return f"permission denied to uid {os.geteuid()}, gid {os.getegid()}"
    return error.strerror or str(error)


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # too long a name
        return False


def _describe_link(path: Path) -> str:
    target = path.readlink()
    reason = f"it is a link to {target}, which does not exist"
    if _HUB_BLOBS in target.parts:
        reason += (
            "; mount the whole folder models--ORG--NAME of the Hub's cache, not a snapshot alone"
        )
    return reason


def _describe_obstacle(path: Path) -> str:
    """Returns which file or folder on the way to a path is closed, to whom, and a remedy."""
    target = Path(os.path.realpath(path))
    for folder in reversed(target.parents):
        if not _has_access(folder, os.X_OK):
            return _describe_closed(folder)
    if not _has_access(target, os.R_OK):
        return _describe_closed(target)
    return (
        f"the mode of {target} allows it: look at SELinux and AppArmor (a container's volume may "
        "need the option z)"
    )


def _has_access(path: Path, access: int) -> bool:
    is_effective = os.access in os.supports_effective_ids
    return os.access(path, access, effective_ids=is_effective)


def _describe_closed(path: Path) -> str:
    try:
        facts = path.stat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    mode = stat.filemode(facts.st_mode)
    return (
        f"{path} is {mode} of uid {facts.st_uid}, gid {facts.st_gid}: open it, as by "
        f"chmod -R a+rX, or run as another user"
    )
