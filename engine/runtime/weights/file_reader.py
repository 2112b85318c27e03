"""`FileReader`: reads parts of files into memory that its callers own, without mapping the files.

Pages of a mapped file would count as memory of the process beside the weights made from them.
"""

import os
from pathlib import Path
from typing import BinaryIO, Self

from baton.common.errors import ConfigurationError

__all__ = ["FileReader"]


class FileReader:
    """Reads from files, and keeps the last one open. Not for several threads at once."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._open: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, path: Path, offset: int, memory: memoryview) -> None:
        """Fills memory with the bytes of a file from `offset` on.

        Raises:
            ConfigurationError: the file ends early or cannot be read.
        """
        try:
            descriptor = self._open_descriptor(path)
            while memory:
                num_read = os.preadv(descriptor, [memory], offset)
                if not num_read:
                    raise ConfigurationError(f"{path} ends before its last tensor does")
                memory, offset = memory[num_read:], offset + num_read
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error

    def close(self) -> None:
        """Closes the last file."""
        if self._open is not None:
            self._open.close()
        self._path = self._open = None

    def _open_descriptor(self, path: Path) -> int:
        if self._open is None or path != self._path:
            self.close()
            self._path, self._open = path, path.open("rb", buffering=0)
        return self._open.fileno()
