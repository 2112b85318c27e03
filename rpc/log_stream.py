"""`LogStream`: a log that outlives a full disk. `RepeatLimit`: bounds its repeated messages.

A failure may repeat thousands of times a second: a port that has no file descriptor left, a store
that is down. The log then says once that it leaves such messages out, and how many these were.
"""

import io
import logging
import math
import re
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from typing_extensions import override

__all__ = ["MAX_REPEATS", "WINDOW_S", "LogStream", "RepeatLimit"]

MAX_REPEATS = 20
"""Messages of one cause within `WINDOW_S`."""
WINDOW_S = 60.0
_LOGGER_NAME = "baton.log"
_PIECE_BYTES = select.PIPE_BUF
"""A pipe that is ready for a write takes so many bytes at once."""
_MAX_WAIT_S = 0.05
"""How long the lines of `_WAIT_PERIOD_S` wait, together, for a reader that is late: the event loop
of the process waits with them."""
_WAIT_PERIOD_S = 1.0
_MAX_CAUSES = 256
"""Causes of which messages are counted at one time. The rest are one cause."""
_MAX_CHARS = 200
"""Of a message's text, in its cause and in the lines that name it."""
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_Cause = tuple[object, ...]
_OTHER_CAUSES: _Cause = ()


class LogStream(io.TextIOBase):
    """A stream in front of another one, such as stderr, whose writes never fail and never block.

    Lines that cannot be written, since the disk is full, or the reader has gone or reads no more,
    are counted. The first line that can be written again follows a line with their number.

    A process must run on while the one that reads its log is stopped. So a pipe that is full gets
    no bytes: it is asked whether it takes some, before each piece. Other threads of the process
    that write to it, past this stream, may take that room first; they are rare.

    Args:
        stream: gets the lines.
        to_line: makes a line of the log out of a text, without an end.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        to_line: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._to_line = to_line
        # A stream with a buffer would keep a part of what it could not write, and repeat it.
        buffer = getattr(stream, "buffer", None)
        is_raw = isinstance(buffer, io.RawIOBase)
        self._raw: Any = buffer if is_raw else getattr(buffer, "raw", None)
        self._descriptor = _descriptor_of(self._raw)
        self._lock = threading.RLock()  # a signal's handler may write while a line is written
        self._num_lost = 0
        self._reason = ""
        self._is_line_cut = False
        self._clock = clock
        self._period_ends_at = -math.inf
        self._wait_left_s = 0.0

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
            written = self._raw.write(rest[:_PIECE_BYTES]) if self._has_room() else None
            if written is None:  # or the stream is one that does not block
                raise BlockingIOError(0, "the reader is too slow")
            rest = rest[written:]
            self._is_line_cut = len(rest) > 0

    def _has_room(self) -> bool:
        """Whether the stream takes bytes. A reader that has just read is waited for, though not
        again and again, and one that has made lines lost is not.
        """
        if self._descriptor is None:
            return True
        room = select.poll()  # one for each question: a signal's handler may ask at the same time
        room.register(self._descriptor, select.POLLOUT)
        if room.poll(0):
            return True
        return not self._num_lost and self._waits_for(room)

    def _waits_for(self, room: select.poll) -> bool:
        """Waits for room, unless lines have waited for long in this period; returns whether it is
        there.
        """
        started_at = self._clock()
        if started_at >= self._period_ends_at:
            self._period_ends_at = started_at + _WAIT_PERIOD_S
            self._wait_left_s = _MAX_WAIT_S
        has_room = bool(room.poll(1000 * self._wait_left_s))
        self._wait_left_s = max(self._wait_left_s - (self._clock() - started_at), 0.0)
        return has_room


def _descriptor_of(raw: Any) -> int | None:
    """Returns the descriptor of a file; None for what is no file of the system."""
    try:
        return int(raw.fileno())
    except (AttributeError, OSError):
        return None


@dataclass(slots=True)
class _Window:
    """Messages of one cause since the first of them.

    Attributes:
        name: its text, as it is in the source, and its logger.
        ends_at: when the next message begins another window.
        num_messages: how many there were.
    """

    name: str
    ends_at: float
    num_messages: int = 0


class RepeatLimit:
    """Admits `MAX_REPEATS` messages of one cause in `WINDOW_S`, from warnings on.

    Messages have one cause if they come from one line of the source with one text, before its
    arguments are filled in and apart from its numbers, and with exceptions of one type. Messages
    below warnings, such as the lines of calls, always pass.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[_Cause, _Window] = {}  # the first to end first

    def admit(self, record: logging.LogRecord) -> Iterator[logging.LogRecord]:
        """Yields the records to write in place of one: how many messages were left out, then the
        record unless it is left out, too.
        """
        now = self._clock()
        yield from self._end_windows(now)
        if record.levelno < logging.WARNING:
            yield record
            return
        window = self._find_window(record, now)
        window.num_messages += 1
        if window.num_messages <= MAX_REPEATS:
            yield record
        elif window.num_messages == MAX_REPEATS + 1:
            yield _record("leaving out more messages for up to %.0f s: %s", WINDOW_S, window.name)

    def end(self) -> Iterator[logging.LogRecord]:
        """Yields records of how many messages were left out that no record has said."""
        return self._end_windows(float("inf"))

    def _end_windows(self, now: float) -> Iterator[logging.LogRecord]:
        while self._windows:
            cause, window = next(iter(self._windows.items()))
            if window.ends_at > now:
                return
            del self._windows[cause]
            num_left_out = window.num_messages - MAX_REPEATS
            if num_left_out > 0:
                yield _record("left out %d messages: %s", num_left_out, window.name)

    def _find_window(self, record: logging.LogRecord, now: float) -> _Window:
        cause = _cause_of(record)
        if cause not in self._windows:
            name = f"{record.name} {_format_text(record)}"
            if len(self._windows) >= _MAX_CAUSES:
                cause, name = _OTHER_CAUSES, "of many causes"
            self._windows.setdefault(cause, _Window(name, now + WINDOW_S))
        return self._windows[cause]


def _cause_of(record: logging.LogRecord) -> _Cause:
    exception = record.exc_info[0] if record.exc_info else None
    text = _NUMBER.sub("", _format_text(record))
    return record.name, record.levelno, record.pathname, record.lineno, text, exception


def _format_text(record: logging.LogRecord) -> str:
    """The first line of the text: asyncio puts what it knows of a failure into further ones."""
    return str(record.msg).partition("\n")[0][:_MAX_CHARS]


def _record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord(_LOGGER_NAME, logging.WARNING, "", 0, text, arguments, None)
