"""`run_timed`: a process that ends in time, with all that it started."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["run_timed"]


def run_timed(
    command: Sequence[str],
    output: IO[bytes],
    seconds: float,
    *,
    folder: Path,
    variables: Mapping[str, str],
) -> int | None:
    """Runs a command; returns its exit status, or None if it was killed as its time was over.

    Args:
        command: the program and its arguments.
        output: gets what it prints.
        seconds: how long it may run.
        folder: it runs there.
        variables: of its environment, beside those of this process.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=os.environ | variables,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            # With the compilers and servers that it started, also after an interruption.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
