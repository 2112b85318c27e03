"""`PeerProcess`: an engine in a process of its own, asked over its standard streams.

Peak memory of a process and its descendants, as Linux tells it.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.peer_messages import (
    PeerError,
    PeerRun,
    format_run,
    parse_answer,
    parse_run,
)
from benchmarks.request import BenchRequest

__all__ = ["Launch", "PeerProcess", "peak_memory_bytes"]

_ANSWER_TIMEOUT_S = 1800.0
_QUIT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a worker.

    Attributes:
        engine: its name here.
        command: program and arguments.
        environment: of the process, whole.
        log: the file that its standard error goes to.
    """

    engine: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


class PeerProcess:
    """A worker that runs; a context manager.

    While it is paused it uses no CPU. It runs from the start, until `pause`.

    Args:
        launch: how to start it.

    Attributes:
        launch: as given.
        description: the engine and its version, once `wait_until_ready` has returned.

    Raises:
        PeerError: of every method but `close`: the worker failed or did not answer in time.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.description = ""
        self._started = time.perf_counter()
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("w") as log:
            self._process = subprocess.Popen(
                launch.command,
                env=dict(launch.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a group of its own, to be stopped as a whole
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Returns when the engine has loaded."""
        self.description = self._answer()["ready"]["engine"]

    @property
    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._started

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory it ever had resident, its children's with it."""
        return peak_memory_bytes(self._process.pid)

    def run(self, requests: Sequence[BenchRequest]) -> PeerRun:
        """Answers the requests, as many tokens as they ask for."""
        answer = self._ask(format_run(requests))
        return parse_run(self.launch.engine, answer, requests)

    def reset(self) -> None:
        """Empties its caches of prefixes."""
        self._ask({"command": "reset"})

    def pause(self) -> None:
        """Stops it from using the CPU."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it run again."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends the worker. Idempotent."""
        if self._process.poll() is None:
            with suppress(OSError):  # it may have ended in between
                self.resume()
                self._send({"command": "quit"})
        try:
            self._process.wait(_QUIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            self._send(command)
        except OSError:
            raise self._ended() from None
        return self._answer()

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # A worker that hangs is killed: then its stream ends, and so does the wait.
        timer = threading.Timer(_ANSWER_TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise self._ended()
        return parse_answer(self.launch.engine, line)

    def _ended(self) -> PeerError:
        return PeerError(f"{self.launch.engine} ended unasked; {self.launch.log} says why")


def peak_memory_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """The sum of the most memory that each living process of the tree ever had resident.

    Pages that processes share, and files that are mapped, count in each.

    Args:
        pid: the tree's root.
        proc: where procfs is mounted.
    """
    own = _high_water_bytes((proc / str(pid) / "status").read_text())
    return own + sum(peak_memory_bytes(child, proc) for child in _children(pid, proc))


def _children(pid: int, proc: Path) -> list[int]:
    files = (proc / str(pid) / "task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def _high_water_bytes(status: str) -> int:
    """The `VmHWM` of a process; 0 of one that has ended and waits for its parent."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 0
