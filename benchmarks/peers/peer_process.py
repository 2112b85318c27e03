"""`PeerProcess`: an engine in a process of its own, used by messages over its standard streams."""

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

from baton.common.errors import BatonError
from benchmarks.request import BenchRequest

__all__ = [
    "Launch",
    "PeerAnswer",
    "PeerError",
    "PeerProcess",
    "PeerRun",
    "format_run",
    "parse_answer",
    "parse_run",
    "peak_memory_bytes",
]
_ANSWER_TIMEOUT_S = 1800.0
_QUIT_TIMEOUT_S = 30.0


class PeerError(BatonError):
    """An engine failed, or gave a wrong answer."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One request's tokens and the time of each, in seconds after the start of the run."""

    token_ids: tuple[int, ...]
    token_times_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One run of a workload.

    Attributes:
        wall_s: seconds from the first request's start to the last token.
        answers: the answers, in the order of the requests.
    """

    wall_s: float
    answers: tuple[PeerAnswer, ...]


def format_run(requests: Sequence[BenchRequest]) -> dict[str, Any]:
    """Returns the command that runs the requests, all at once."""
    return {
        "command": "run",
        "requests": [
            {
                "prompt_token_ids": list(request.prompt_token_ids),
                "num_output_tokens": request.num_output_tokens,
            }
            for request in requests
        ],
    }


def parse_answer(engine: str, line: str) -> dict[str, Any]:
    """Parses a worker's line.

    Raises:
        PeerError: the line reports an error, or is no answer.
    """
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise PeerError(f"{engine} answered {line[:80]!r}, which is no JSON object")
    if "error" in answer:
        raise PeerError(f"{engine} failed: {answer['error']}")
    return answer


def parse_run(engine: str, answer: dict[str, Any], requests: Sequence[BenchRequest]) -> PeerRun:
    """Parses the answer to `format_run(requests)`.

    Raises:
        PeerError: a request has too few or too many tokens, or tokens have no times.
    """
    answers = tuple(
        PeerAnswer(tuple(result["token_ids"]), tuple(result["token_times_s"]))
        for result in answer["requests"]
    )
    if len(answers) != len(requests):
        raise PeerError(f"{engine} answered {len(answers)} of {len(requests)} requests")
    for index, (result, request) in enumerate(zip(answers, requests, strict=True)):
        counts = (len(result.token_ids), len(result.token_times_s))
        if counts != (request.num_output_tokens,) * 2:
            raise PeerError(
                f"{engine} gave request {index} {counts[0]} tokens at {counts[1]} times; "
                f"{request.num_output_tokens} were asked for"
            )
    return PeerRun(answer["wall_s"], answers)


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a worker.

    Attributes:
        engine: the engine's name.
        command: program and arguments.
        environment: all environment variables of the process.
        log: the file for its standard error.
    """

    engine: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


class PeerProcess:
    """A running worker; a context manager.

    A paused worker uses no CPU. A new worker is not paused.

    Args:
        launch: how to start it.

    Attributes:
        launch: how it was started.
        description: the engine and its version, set by `wait_until_ready`.

    Raises:
        PeerError: the worker failed or did not answer in time. Every method but `close` raises it.
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
                start_new_session=True,  # signals reach the whole group
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
        """Waits until the engine has loaded."""
        self.description = self._answer()["ready"]["engine"]

    @property
    def age_s(self) -> float:
        """Seconds since the start of the process."""
        return time.perf_counter() - self._started

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory that the process and its descendants had resident."""
        return peak_memory_bytes(self._process.pid)

    def run(self, requests: Sequence[BenchRequest]) -> PeerRun:
        """Runs the requests; returns their tokens and times."""
        answer = self._ask(format_run(requests))
        return parse_run(self.launch.engine, answer, requests)

    def write_logits(self, token_ids: Sequence[int], file: Path) -> None:
        """Writes the logits after each token of a text to a file, `[num_tokens, vocab]` float32."""
        self._ask({"command": "logits", "token_ids": list(token_ids), "file": str(file)})

    def reset(self) -> None:
        """Empties the engine's prefix caches."""
        self._ask({"command": "reset"})

    def pause(self) -> None:
        """Stops the processes, so that they use no CPU."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continues the processes."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends the worker. Idempotent."""
        if self._process.poll() is None:
            with suppress(OSError):  # it may have ended meanwhile
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
        # A worker that hangs is killed, which ends its stream and the wait.
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
    """Returns the sum of the peak resident memory of each living process of a tree.

    Shared pages and mapped files count in each process.

    Args:
        pid: the root of the tree.
        proc: where procfs is mounted.
    """
    own = _high_water_bytes((proc / str(pid) / "status").read_text())
    return own + sum(peak_memory_bytes(child, proc) for child in _children(pid, proc))


def _children(pid: int, proc: Path) -> list[int]:
    files = (proc / str(pid) / "task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def _high_water_bytes(status: str) -> int:
    """Returns the `VmHWM` of a process; 0 if the process is a zombie."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 0
