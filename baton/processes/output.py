"""What a command and the processes that it starts write to the terminal or to the log."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from rpc.logs import JsonStderr, json_line_of_process

__all__ = ["discard_unread_output", "log_writer"]


def log_writer(log_format: str) -> Callable[[str], None]:
    """Returns what writes the lines of processes, each "process | text", to the log.

    Args:
        log_format: text or json.
    """
    if log_format == "text":
        return _write_log_line

    def write_json(line: str) -> None:
        process, _, text = line.partition(" | ")
        _write_log_line(json_line_of_process(process, text))

    return write_json


def _write_log_line(line: str) -> None:
    """Writes to the log. If the reader has closed the pipe, the processes keep running."""
    # The line is in its form already; `JsonStderr` would make it the message of another one.
    stderr = sys.stderr.stream if isinstance(sys.stderr, JsonStderr) else sys.stderr
    try:
        stderr.write(f"{line}\n")
    except OSError:
        discard_unread_output()


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
