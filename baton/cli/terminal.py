"""`Terminal`: streamed text on stdout, dimmed where it is not the answer; notes on stderr."""

import os
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from typing import Any, TextIO

__all__ = ["Terminal", "end_of", "format_usage", "has_colors"]

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Terminal:
    """Prints parts of a text as they arrive.

    Dimmed text is printed to a terminal only, so that a pipe gets nothing but the answer. Escape
    sequences are used unless `NO_COLOR` is set or `TERM` is `dumb`. Characters that the terminal's
    encoding lacks, and bytes on stdin that are no text, are replaced.
    """

    def __init__(self) -> None:
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, TextIOWrapper):  # a test's may be another
                stream.reconfigure(errors="replace")
        self._last = "\n"
        self._is_dimmed = False

    def write(self, text: str) -> None:
        """Prints a part of the answer."""
        if self._is_dimmed:
            self._is_dimmed = False
            self._print(f"{_PLAIN if has_colors(sys.stdout) else ''}\n")
        self._print(text)

    def write_dimmed(self, text: str) -> None:
        """Prints a part of what comes before the answer, if stdout is a terminal."""
        if not text or not sys.stdout.isatty():
            return
        if not self._is_dimmed:
            self._is_dimmed = True
            self._print(_DIM if has_colors(sys.stdout) else "")
        self._print(text)

    def end_line(self) -> None:
        """Ends the text and its line, if it does not end with a line."""
        if self._is_dimmed:
            self._is_dimmed = False
            self._print(_PLAIN if has_colors(sys.stdout) else "")
        if self._last != "\n":
            self._print("\n")

    def note(self, text: str) -> None:
        """Writes a line about the text to stderr."""
        sys.stdout.flush()
        line = f"{_DIM}{text}{_PLAIN}" if has_colors(sys.stderr) else text
        sys.stderr.write(f"{line}\n")

    def _print(self, text: str) -> None:
        if text:
            print(text, end="", flush=True)
            self._last = text[-1] if text != _PLAIN else self._last


def end_of(text: str, chars: int) -> str:
    """Returns a text of ASCII, or its end if it is longer than its column."""
    text = ascii(text)[1:-1]
    return text if len(text) <= chars else f"..{text[2 - chars :]}"


def format_usage(finish_reason: str | None, usage: Mapping[str, Any] | None) -> str:
    """Formats why a text ended, and the token counts of OpenAI's `usage`, in one line."""
    if not usage:
        return f"[{finish_reason}]"
    details = usage.get("prompt_tokens_details") or {}
    counts = (
        (usage.get("prompt_tokens"), "prompt"),
        (details.get("cached_tokens"), "cached"),
        (usage.get("completion_tokens"), "generated"),
    )
    known = ", ".join(f"{count} {name}" for count, name in counts if count is not None)
    return f"[{finish_reason}; tokens: {known}]"


def has_colors(stream: TextIO) -> bool:
    """Whether a stream shows escape sequences: a terminal, unless the environment forbids them."""
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain
