"""`UnixSocket`: a unix socket at which a server listens, from its start to its removal."""

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from baton.common.errors import ConfigurationError

__all__ = ["UnixSocket"]

_MODE = 0o660
"""A proxy in front, which runs as another user, has a group in common with the server."""
_CONNECT_TIMEOUT_S = 1.0
_LOCK_TIMEOUT_S = 5.0
_LOCK_INTERVAL_S = 0.01
_GONE = (errno.ECONNREFUSED, errno.ENOENT)


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A socket that listens at a path.

    Attributes:
        listener: the socket.
        path: its path.
        identity: device and inode of the path.
    """

    listener: socket.socket
    path: Path
    identity: tuple[int, int]

    @classmethod
    def open(cls, path: str, backlog: int) -> "UnixSocket":
        """Listens at a path, in place of a socket that a server left behind when it was killed.
        Waits for seconds at most.

        Args:
            path: the path; its folder exists.
            backlog: connections that wait to be accepted.

        Raises:
            ConfigurationError: another server listens there, the path is no socket, or it cannot be
                bound; names the flag.
        """
        place = Path(path)
        try:
            with _folder_lock(place), ExitStack() as unopened:
                _remove_stale(place)
                listener = unopened.enter_context(socket.socket(socket.AF_UNIX))
                os.fchmod(listener.fileno(), _MODE)  # at no time may others connect
                listener.bind(path)
                unopened.callback(place.unlink)
                place.chmod(_MODE)  # whatever the process's umask took
                listener.listen(backlog)
                opened = cls(listener, place, _identity(place))
                unopened.pop_all()
                return opened
        except OSError as error:
            reason = error.strerror or error  # a path that is too long has no number
            raise ConfigurationError(f"cannot listen on --uds {path}: {reason}") from None

    def remove(self) -> None:
        """Removes the path, unless it is no longer the socket's. Idempotent. Called while the
        socket listens: until then no other server takes the path, and no file gets its inode.
        """
        with suppress(OSError):  # the path or its folder has gone
            if _identity(self.path) == self.identity:
                self.path.unlink()


@contextmanager
def _folder_lock(path: Path) -> Iterator[None]:
    """Lets one process at a time look at the sockets of a folder and change them."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(folder)
        yield
    finally:
        os.close(folder)


def _lock(folder: int) -> None:
    """Locks an open folder, for which others wait for milliseconds.

    Raises:
        OSError: it stays locked.
    """
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOCK_INTERVAL_S)
        else:
            return


def _remove_stale(path: Path) -> None:
    """Removes a socket at which no process listens.

    Raises:
        ConfigurationError: a process listens there, or the path is no socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"--uds {path} exists and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno not in _GONE:  # its backlog may be full, or it is another user's
                raise
        else:
            raise ConfigurationError(f"--uds {path} is in use by another process")
    path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
