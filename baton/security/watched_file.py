"""`WatchedFile`: what a file holds, read again when the file changes."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.errors import ConfigurationError

__all__ = ["WatchedFile"]

_Content = TypeVar("_Content")
_LOGGER = logging.getLogger("baton.security")


class WatchedFile(Generic[_Content]):
    """Serves the content of a file. Any thread may use it.

    The last good content stays in use while a changed file cannot be read or is bad, which a
    warning reports.

    Args:
        path: the file.
        read: makes the content from the path; raises `ConfigurationError`, without secrets.

    Raises:
        ConfigurationError: the file cannot be read, or is bad.
    """

    def __init__(self, path: str, read: Callable[[str], _Content]) -> None:
        self._path = path
        self._read = read
        self._lock = threading.Lock()
        self._stamp = self._read_stamp()
        self._content = read(path)

    def current(self) -> _Content:
        """The content now: the same object until the file changes."""
        with self._lock:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._content = self._read(self._path)
                    _LOGGER.info("read again: %s", self._path)
                except ConfigurationError as error:
                    _LOGGER.warning("the last good content stays in use: %s", error.message)
            return self._content

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self._path)  # noqa: PTH116 - each call asks; a Path costs more than that
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
