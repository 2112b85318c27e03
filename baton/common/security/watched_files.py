"""`WatchedFiles`: what files hold, read again when they change."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from baton.common.errors import ConfigurationError

__all__ = ["WatchedFiles"]

_Content = TypeVar("_Content")
_RETRY_S = 1.0
_LOGGER = logging.getLogger("baton.security")

# What changes with a file; None for one that cannot be found.
_Stamp = tuple[int, int, int, int] | None


class WatchedFiles(Generic[_Content]):
    """Serves the content of files. Any thread may use it.

    The last good content stays in use while changed files cannot be read or are bad, which a
    warning reports. They are read again when they change further, and after a second: the cause
    need not be in the files, for example while the process has no free descriptor.

    Args:
        paths: the files.
        read: makes the content of them all; raises `ConfigurationError`, without secrets.
        name: what the files hold, for the log.

    Attributes:
        version: how often changed files were read with success.

    Raises:
        ConfigurationError: the files cannot be read, or are bad.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], _Content], name: str) -> None:
        self._paths = paths
        self._read = read
        self._name = name
        self._lock = threading.Lock()
        # Taken before the files are read: a change in between is seen later.
        self._stamps = self._read_stamps()
        self._content = read()
        self._failed_stamps: Sequence[_Stamp] | None = None
        self._failed_at = 0.0
        self.version = 0

    def current(self) -> _Content:
        """The content now: the same object until the files change."""
        with self._lock:
            stamps = self._read_stamps()
            if stamps != self._stamps and self._may_read(stamps):
                self._read_again(stamps)
            return self._content

    @property
    def last(self) -> _Content:
        """The content that was read last; the files are not looked at."""
        return self._content

    def _may_read(self, stamps: Sequence[_Stamp]) -> bool:
        return stamps != self._failed_stamps or time.monotonic() - self._failed_at >= _RETRY_S

    def _read_again(self, stamps: Sequence[_Stamp]) -> None:
        try:
            self._content = self._read()
        except (ConfigurationError, OSError, ValueError) as error:
            if stamps != self._failed_stamps:
                _LOGGER.warning("the last good %s stay in use: %s", self._name, error)
            self._failed_stamps, self._failed_at = stamps, time.monotonic()
            return
        self._stamps, self._failed_stamps = stamps, None
        self.version += 1
        _LOGGER.info("%s read again: %s", self._name, ", ".join(self._paths))

    def _read_stamps(self) -> Sequence[_Stamp]:
        return [_read_stamp(path) for path in self._paths]


def _read_stamp(path: str) -> _Stamp:
    try:
        stat = os.stat(path)  # noqa: PTH116 - each call asks; a Path costs more than that
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
