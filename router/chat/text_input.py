"""`TextInput`: text that arrives in pieces, for parsers that are written as generators.

A parser reads with `yield from`. A read that needs more text yields; the parser's owner resumes it
after the next piece. What a read returns never depends on how the text was cut into pieces.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeAlias, TypeVar

__all__ = ["WHITESPACE", "Steps", "TextInput"]

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A read: it yields while it waits for text, and returns a T."""

WHITESPACE = re.compile(r"\s+")

MAX_WHITESPACE = 256
"""Maximum number of characters of whitespace that a parser reads at once, or holds back."""


class TextInput:
    """Text that is pushed in pieces and read in order.

    It keeps the unread text, which is never longer than one piece and one mark, and the text that
    was read since `record`.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._ended = False
        self._record: list[str] | None = None

    @property
    def num_unread(self) -> int:
        """The number of characters that were pushed and not read."""
        return len(self._text) - self._position

    def push(self, text: str) -> None:
        """Adds text at the end."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """Says that there is no more text: reads no longer wait."""
        self._ended = True

    def record(self, text: str = "") -> None:
        """Starts to keep the text that is read, in place of what was kept before.

        Args:
            text: read before, kept as the beginning.
        """
        self._record = [text]

    def take_record(self) -> str:
        """Returns the text that was read since `record`, and keeps no more."""
        text = "".join(self._record or ())
        self._record = None
        return text

    def peek(self) -> Steps[str]:
        """Returns the next character without reading it; empty at the end."""
        while not self.num_unread:
            if self._ended:
                return ""
            yield
        return self._text[self._position]

    def read(self, length: int = 1) -> str:
        """Reads characters that are there, such as the one that `peek` returned."""
        start = self._position
        self._position = min(start + length, len(self._text))
        text = self._text[start : self._position]
        if self._record is not None:
            self._record.append(text)
        return text

    def skip(self, mark: str, *, or_beginning: bool = False) -> Steps[bool]:
        """Reads a mark if it comes next; otherwise it reads nothing and returns False.

        Args:
            mark: the text to read.
            or_beginning: a mark that the end of the text cuts short counts too.
        """
        if (yield from self.has_next(mark, or_beginning=or_beginning)):
            self.read(len(mark))
            return True
        return False

    def skip_any(self, marks: Sequence[str], *, or_beginning: bool = False) -> Steps[str]:
        """Reads the first of several marks that comes next, and returns it; else ""."""
        for mark in marks:
            if (yield from self.skip(mark, or_beginning=or_beginning)):
                return mark
        return ""

    def has_next(self, mark: str, *, or_beginning: bool = False) -> Steps[bool]:
        """Returns whether a mark comes next, without reading it. Arguments are those of `skip`."""
        while not self._text.startswith(mark, self._position):
            begun = self._text[self._position : self._position + len(mark)]
            if self._ended and begun and or_beginning and mark.startswith(begun):
                return True
            if self._ended or not mark.startswith(begun):
                return False
            yield
        return True

    def copy(self, run: re.Pattern[str], sink: Callable[[str], object]) -> Steps[None]:
        """Reads the longest run of characters.

        Args:
            run: matches any run of the characters.
            sink: called with each piece as it arrives.
        """
        while (yield from self.peek()):
            match = run.match(self._text, self._position)
            if match is None:
                return
            sink(self.read(len(match[0])))

    def read_run(self, run: re.Pattern[str], max_length: int) -> Steps[str]:
        """Reads and returns the longest run of characters, up to a length."""
        text = ""
        while len(text) < max_length and (yield from self.peek()):
            end = self._position + max_length - len(text)
            match = run.match(self._text, self._position, end)
            if match is None:
                break
            text += self.read(len(match[0]))
        return text

    def skip_whitespace(self) -> Steps[None]:
        """Reads whitespace, but no more than `MAX_WHITESPACE` characters."""
        yield from self.read_run(WHITESPACE, MAX_WHITESPACE)

    def copy_until(self, mark: str, sink: Callable[[str], object]) -> Steps[bool]:
        """Reads text up to and with a mark. Without the mark it reads all and returns False.

        Args:
            mark: ends the read; the sink does not get it.
            sink: called with each piece of the text before the mark.
        """
        if (yield from self.copy_to((mark,), sink)):
            self.read(len(mark))
            return True
        return False

    def copy_to(self, marks: tuple[str, ...], sink: Callable[[str], object]) -> Steps[str]:
        """Reads text up to the first of several marks, and returns the mark without reading it.

        Args:
            marks: none is the beginning of another. Without one all text is read; returns "".
            sink: called with each piece of the text before the mark.
        """
        pattern = _pattern_of(marks)
        while True:
            match = pattern.search(self._text, self._position)
            end = match.start() if match else len(self._text) - self._num_begun(marks)
            if end > self._position:
                sink(self.read(end - self._position))
            if match:
                return match[0]
            if self._ended:
                return ""
            yield

    def copy_rest(self, sink: Callable[[str], object]) -> Steps[None]:
        """Reads all text to the end."""
        while (yield from self.peek()):
            sink(self.read(self.num_unread))

    def _num_begun(self, marks: tuple[str, ...]) -> int:
        """Returns how many of the last characters may be the beginning of a mark."""
        if self._ended:
            return 0
        longest = max(map(len, marks))
        for length in range(min(longest - 1, self.num_unread), 0, -1):
            last = self._text[-length:]
            if any(mark.startswith(last) for mark in marks):
                return length
        return 0


@cache
def _pattern_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))
