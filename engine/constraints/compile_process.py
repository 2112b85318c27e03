"""`CompileProcess`: the engine's side of the compile process, which compiles grammars."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from baton.common.errors import UnavailableError
from baton.common.module_process import module_command, path_variable
from engine.constraints.interface import MAX_COMPILER_THREADS
from engine.constraints.vocabulary import Vocabulary

__all__ = ["READY", "STARTED", "WALL_TIMES", "CompileProcess", "JobLostError", "JobTimeoutError"]
__all__ += ["read_message", "write_message"]

READY = b"R"
"""The compile process takes jobs."""
STARTED = b"S"
"""A job runs in a process of its own."""
_MODULE = "engine.constraints.compile_server"
_HEADER_BYTES = 8

# The compile process imports the backends first, and xgrammar imports torch.
_START_TIMEOUT_S = 120.0
WALL_TIMES = 3
"""A job ends after its timeout in CPU time, or after so many times that on the clock: engines that
use all cores slow it down.
"""
# The kernel ends a job at its deadline; the parent waits this much longer.
_MARGIN_S = 5.0


class JobTimeoutError(Exception):
    """The job took longer than its timeout."""


class JobLostError(Exception):
    """The job's process died: out of memory or stack overflow."""


class CompileProcess:
    """Starts `engine.constraints.compile_server` and sends it jobs. Thread-safe.

    Args:
        get_vocabulary: returns the token table to compile for; called when the process starts.
        backends: the names of the backends that the compile process loads.
    """

    def __init__(self, get_vocabulary: Callable[[], Vocabulary], backends: Sequence[str]) -> None:
        self._get_vocabulary = get_vocabulary
        self._backends = tuple(backends)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def run_job(self, job: bytes, timeout_s: float) -> bytes:
        """Returns the answer to a job, which may take `timeout_s` of CPU time. Several threads may
        run one each.

        The first job starts the compile process.

        Raises:
            JobTimeoutError: the job took longer than `timeout_s`.
            JobLostError: its process died.
            UnavailableError: the compile process did not start, or `close` was called.
        """
        process, answer = self._run_once(job, timeout_s)
        if answer is None and not self._is_alive(process):
            # Another job ended the compile process, and this job with it.
            process, answer = self._run_once(job, timeout_s)
        if answer is None:
            raise JobLostError
        return answer

    def _run_once(
        self, job: bytes, timeout_s: float
    ) -> tuple["subprocess.Popen[bytes] | None", bytes | None]:
        """Returns the compile process, and its answer to a job; None if the job's process died."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                process = self._send(theirs)
            ours.settimeout(WALL_TIMES * timeout_s + _MARGIN_S)
            try:
                return process, _talk(ours, job, timeout_s)
            except JobTimeoutError:
                if self._is_alive(process):
                    raise
                return process, None  # it was not the job's own time that has ended it
            except TimeoutError:
                with self._lock:
                    self._kill()
                raise JobTimeoutError from None
            except OSError:
                return process, None

    def _is_alive(self, process: "subprocess.Popen[bytes] | None") -> bool:
        with self._lock:
            return process is not None and self._process is process and process.poll() is None

    def close(self) -> None:
        """Ends the compile process for good, even while it starts. Idempotent."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # then a thread that waits for it releases the lock
        with self._lock:
            self._kill()

    def _ensure_started(self) -> socket.socket:
        """Returns the control socket of the compile process; starts the process unless it runs."""
        if self._is_closed:
            raise UnavailableError("the worker is stopping")
        if self._process is not None and self._process.poll() is not None:
            self._kill()
        if self._control is None:
            self._control = self._launch()
        return self._control

    def _send(self, channel: socket.socket) -> "subprocess.Popen[bytes] | None":
        """Sends the channel of a job to the compile process; restarts it if it has died."""
        try:
            socket.send_fds(self._ensure_started(), [b"J"], [channel.fileno()])
        except OSError:
            self._kill()
            socket.send_fds(self._ensure_started(), [b"J"], [channel.fileno()])
        return self._process

    def _launch(self) -> socket.socket:
        vocabulary = self._get_vocabulary()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - a module of this package
                module_command(_MODULE, str(theirs.fileno()), *self._backends),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Its children are killed with it, as one group.
                start_new_session=True,
                env=_environment(),
            )
        try:
            ours.settimeout(_START_TIMEOUT_S)
            if self._is_closed:  # `close` may have been called just before the process existed
                raise ConnectionError("the worker is stopping")
            write_message(ours, vocabulary.to_json().encode())
            if ours.recv(1) != READY:
                raise ConnectionError("it ended")
            ours.settimeout(None)
        except OSError as error:
            ours.close()
            self._kill()
            raise UnavailableError(
                f"the process that compiles grammars did not start: {error}"
            ) from error
        return ours

    def _kill(self) -> None:
        """Ends the compile process and all its jobs at once; the next job starts it anew."""
        control, self._control = self._control, None
        if control is not None:
            control.close()
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment() -> dict[str, str]:
    """Returns the environment of the compile process."""
    # A process with threads must not be forked.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return os.environ | single | path_variable()


def _talk(channel: socket.socket, job: bytes, timeout_s: float) -> bytes | None:
    """Sends a job and returns its answer; None if the job's process died before its timeout."""
    if channel.recv(1) != STARTED:
        return None
    started = time.monotonic()
    write_message(channel, job)
    answer = read_message(channel)
    if answer is not None:
        return answer
    # The CPU time of a job's threads adds up: it is over sooner than that on the clock.
    if time.monotonic() - started > 0.95 * timeout_s / MAX_COMPILER_THREADS:
        raise JobTimeoutError
    return None


def write_message(channel: socket.socket, message: bytes) -> None:
    """Sends a message with its length before it."""
    channel.sendall(len(message).to_bytes(_HEADER_BYTES, "big"))
    channel.sendall(message)


def read_message(channel: socket.socket) -> bytes | None:
    """Returns the next message; None if the other side has closed the channel."""
    header = _read_bytes(channel, _HEADER_BYTES)
    return None if header is None else _read_bytes(channel, int.from_bytes(header, "big"))


def _read_bytes(channel: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        part = channel.recv(min(1 << 20, num_bytes - len(data)))
        if not part:
            return None
        data += part
    return bytes(data)
