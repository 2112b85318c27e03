"""`RepeatLimit`: bounds how many messages of one cause a log gets.

A failure may repeat thousands of times a second: a port that has no file descriptor left, a store
that is down. The log then says once that it leaves such messages out, and how many these were.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["MAX_REPEATS", "WINDOW_S", "RepeatLimit"]

MAX_REPEATS = 20
"""Messages of one cause within `WINDOW_S`."""
WINDOW_S = 60.0

_LOGGER_NAME = "baton.log"
_MAX_CAUSES = 256
"""Causes of which messages are counted at one time. The rest are one cause."""
_MAX_CHARS = 200
"""Of a message's text, in its cause and in the lines that name it."""
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")

_Cause = tuple[object, ...]
_OTHER_CAUSES: _Cause = ()


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
