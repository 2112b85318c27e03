"""Output whose reader has left: `baton generate ... | head` closes the pipe it reads."""

import os
import sys
from pathlib import Path

__all__ = ["discard_unread_output"]


def discard_unread_output() -> None:
    """Sends output that failed, and all that follows it, nowhere.

    To be called upon a failed write. What was to be written stays buffered and
    would fail again: on the next write, and on the flush when Python ends.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
