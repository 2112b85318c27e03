"""A container with this checkout and Python, but no compiler, no curl, no git and no network."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.containers import BASE_IMAGE, ROOT, run_program

_MAKE = Path("/usr/bin/make")
_POLL_S = 0.3
_TIMEOUT_S = 300.0
"""A cluster without compiled kernels takes half a minute to start, minutes on a busy machine."""


class BareMachine:
    """A running command in a container of Docker's defaults, among them 64 MB of shared memory.

    Args:
        container: its id.
    """

    def __init__(self, container: str) -> None:
        self._container = container

    def wait_for(self, text: str, timeout_s: float = _TIMEOUT_S) -> str:
        """Returns what the command printed, as soon as that contains `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in (output := self.output()):
            assert self._is_running(), output
            assert time.monotonic() < deadline, output
            time.sleep(_POLL_S)
        return output

    def output(self) -> str:
        logs = run_program("docker", "logs", self._container)
        return logs.stdout + logs.stderr

    def run(self, *command: str, text: str = "", timeout_s: float = _TIMEOUT_S) -> str:
        """Runs another command there, with `text` as its input; returns what it prints."""
        return run_program(
            *("docker", "exec", "--interactive", self._container, *command),
            text=text,
            timeout_s=timeout_s,
        ).stdout

    def interrupt(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Presses Ctrl-C, and waits until the command has ended."""
        run_program("docker", "kill", "--signal=INT", self._container)
        run_program("docker", "wait", self._container, timeout_s=timeout_s)

    def _is_running(self) -> bool:
        template = "--format={{.State.Running}}"
        return "true" in run_program("docker", "inspect", template, self._container).stdout


@contextmanager
def bare_machine(*command: str) -> Iterator[BareMachine]:
    """Starts a command in a container; removes the container at the end.

    The packages are those of this checkout's virtual environment, since nothing can be installed
    there. The compiled kernels are hidden.
    """
    shared = (ROOT, Path(sys.base_prefix), _MAKE)
    mounts = [f"--volume={path}:{path}:ro" for path in shared]
    hidden = f"--tmpfs={ROOT / 'kernels' / 'native' / 'lib'}"
    # A terminal sends Ctrl-C to all processes of the command.
    init = ("--init", "--env=TINI_KILL_PROCESS_GROUP=1")
    options = ("--detach", *init, "--network=none", *mounts, hidden, f"--workdir={ROOT}")
    container = run_program("docker", "run", *options, BASE_IMAGE, *command).stdout.strip()
    try:
        yield BareMachine(container)
    finally:
        run_program("docker", "rm", "--force", "--volumes", container)


def has_make() -> bool:
    """Whether this machine has make, which the container borrows."""
    return os.access(_MAKE, os.X_OK)
