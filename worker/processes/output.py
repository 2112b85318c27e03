"""The output of a command and of its processes, to the terminal or to the log."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from rpc.logs import json_line_of_process, log_stream

__all__ = ["discard_unread_output", "log_writer"]

_LOG_NAME = "log"
"""Process of the lines that tell of the log itself."""


def log_writer(log_format: str) -> Callable[[str], None]:
    """Returns a writer of the lines of processes, each "process | text", to stderr. If it cannot
    be written, the processes keep running.

    Args:
        log_format: text or json.
    """
    to_line = _json_line if log_format == "json" else str
    stream = log_stream(lambda text: to_line(f"{_LOG_NAME} | {text}"))

    def write(line: str) -> None:
        stream.write(f"{to_line(line)}\n")

    return write


def _json_line(line: str) -> str:
    process, _, text = line.partition(" | ")
    return json_line_of_process(process, text)


def discard_unread_output() -> None:
    """Redirects an output stream whose reader has closed the pipe to the null device.

    Call it after a failed write, as in `baton generate ... | head`. The text of that write
    stays in the stream's buffer, so that without the redirection the next write and the flush
    at exit would fail again.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with Path(os.devnull).open("wb") as null_device:
                os.dup2(null_device.fileno(), stream.fileno())
