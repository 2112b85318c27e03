"""`LogStream`: a log that outlives a full disk."""

import io
import threading
from collections.abc import Callable
from typing import Any, TextIO

from typing_extensions import override

__all__ = ["LogStream"]


class LogStream(io.TextIOBase):
    """A stream in front of another one, such as stderr, whose writes never fail.

    Lines that cannot be written, since the disk is full or the reader has gone, are counted. The
    first line that can be written again follows a line with their number.

    Args:
        stream: gets the lines.
        to_line: makes a line of the log out of a text, without an end.
    """

    def __init__(self, stream: TextIO, to_line: Callable[[str], str]) -> None:
        self._stream = stream
        self._to_line = to_line
        # A stream with a buffer would keep a part of what it could not write, and repeat it.
        buffer = getattr(stream, "buffer", None)
        is_raw = isinstance(buffer, io.RawIOBase)
        self._raw: Any = buffer if is_raw else getattr(buffer, "raw", None)
        self._lock = threading.RLock()  # a signal's handler may write while a line is written
        self._num_lost = 0
        self._reason = ""
        self._is_line_cut = False

    @override
    def write(self, text: str, /) -> int:
        """Writes a text, which should end with its line, or counts its lines as lost."""
        with self._lock:
            try:
                if self._num_lost:
                    self._report_lost()
                self._put(text)
            except OSError as error:
                self._num_lost += text.count("\n")
                self._reason = error.strerror or type(error).__name__
        return len(text)

    @override
    def flush(self) -> None:
        """Does nothing: `write` has flushed."""

    @override
    def fileno(self) -> int:
        """The stream's own."""
        return self._stream.fileno()

    @override
    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    @override
    def writable(self) -> bool:
        """Always true."""
        return True

    def _report_lost(self) -> None:
        end_of_cut_line = "\n" if self._is_line_cut else ""
        line = self._to_line(f"{self._num_lost} lines of the log were lost: {self._reason}")
        self._put(f"{end_of_cut_line}{line}\n")
        self._num_lost = 0

    def _put(self, text: str) -> None:
        """Writes a text.

        Raises:
            OSError: a part, or all of it, could not be written.
        """
        if self._raw is None:
            self._stream.write(text)
            self._stream.flush()
            return
        rest = memoryview(text.encode(errors="backslashreplace"))
        while rest:
            written = self._raw.write(rest)
            if written is None:  # only a stream that does not block returns it
                raise BlockingIOError(0, "the reader is too slow")
            rest = rest[written:]
            self._is_line_cut = len(rest) > 0
