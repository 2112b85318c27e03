"""Python processes that are forked from one that has imported torch.

A process that computes imports torch first, which takes a second and a half of a core, far more
than most tests. A forked process runs a module as `python -m` does, and is a child of the process
that starts it:

    starter --> server, which has imported `_PRELOADED` --> process between --> forked process
       ^                                                    which ends at once         |
       +------------------------- adopts --------------------------------------+
"""

import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO

from baton.common.module_process import end_with_parent

__all__ = ["ForkServer", "ForkedProcess"]

_ROOT = Path(__file__).resolve().parents[2]
# Whatever ranks, workers and routers import, without anything that starts a thread.
_PRELOADED = (
    "engine.runtime.ranks.loop",
    "engine.runtime.model_runner",
    "router.server",
    "worker.server",
)
_OWN_MODULE = "baton.common.module_process"
_PR_SET_CHILD_SUBREAPER = 36
_MAX_BYTES = 1 << 17
_MAX_FILES = 32
_FIRST_FREE_FILE = 500  # above all numbers that descriptors shall have in forked processes


@dataclass(frozen=True)
class _Task:
    """The arguments of a forked process.

    Attributes:
        module: name of the module that it runs.
        arguments: its arguments.
        files: number in the forked process of each descriptor.
        environment: its environment.
        path: its `sys.path`.
        folder: its working directory.
        parent: id of the process that starts it.
        has_session: whether it leads a session of its own.
    """

    module: str
    arguments: tuple[str, ...]
    files: tuple[int, ...]
    environment: dict[str, str]
    path: list[str]
    folder: str
    parent: int
    has_session: bool


class ForkedProcess:
    """A forked process, with the methods of `subprocess.Popen` that the product uses.

    Attributes:
        pid: its id.
        returncode: its exit status once it has been waited for; negative after a signal.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Returns the exit status; None while the process runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process and returns its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the process at once."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts the process that forks, when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    @property
    def subprocess(self) -> SimpleNamespace:
        """Takes the place of the module `subprocess` where modules of Baton are started."""
        return SimpleNamespace(**{**vars(subprocess), "Popen": self.start})

    def start(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> "ForkedProcess | subprocess.Popen[bytes]":
        """Starts a process as `subprocess.Popen` does.

        Args:
            command: `python -m MODULE ARGUMENTS...`; the module may be
                `baton.common.module_process`.
                Any other command is not forked.
            stdin: of a command that is not forked; forked processes read nothing.
            stdout: its standard output; None: that of this process.
            stderr: its standard error; None: that of this process.
            pass_fds: descriptors that it has under the same numbers.
            start_new_session: whether it leads a session.
            cwd: its working directory; None: that of this process.
            env: its environment; None: that of this process.
        """
        if command[0] != sys.executable:
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=start_new_session,
                cwd=cwd,
                env=env,
            )
        module, *arguments = command[command.index("-m") + 1 :]
        if module == _OWN_MODULE:  # whatever is forked ends with its parent
            _, module, *arguments = arguments
        with Path(os.devnull).open() as nothing:
            files = {
                0: nothing.fileno(),
                1: 1 if stdout is None else stdout.fileno(),
                2: 2 if stderr is None else stderr.fileno(),
                **{file: file for file in pass_fds},
            }
            task = _Task(
                module=module,
                arguments=tuple(arguments),
                files=tuple(files),
                environment=dict(os.environ if env is None else env),
                path=[entry or str(Path.cwd()) for entry in sys.path],
                folder=str(cwd or Path.cwd()),
                parent=os.getpid(),
                has_session=start_new_session,
            )
            return ForkedProcess(self._fork(task, list(files.values())))

    def close(self) -> None:
        """Ends the process that forks."""
        if self._server is not None and self._channel is not None:
            self._channel.close()
            self._server.wait()

    def _fork(self, task: _Task, files: list[int]) -> int:
        with self._lock:
            channel = self._opened()
            with _adopting():
                socket.send_fds(channel, [pickle.dumps(task)], files)
                return int(channel.recv(_MAX_BYTES))

    def _opened(self) -> socket.socket:
        if self._channel is None:
            self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    cwd=_ROOT,
                    # Without threads of OpenBLAS, which numpy starts when it is imported.
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        return self._channel


@contextmanager
def _adopting() -> Iterator[None]:
    """Inside, this process becomes the parent of descendants whose parents end."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(channel: socket.socket) -> _Task:
    """Forks for each task, and ends when the starter does; returns in the forked processes."""
    while True:
        message, files, *_ = socket.recv_fds(channel, _MAX_BYTES, _MAX_FILES)
        if not message:
            sys.exit()
        task: _Task = pickle.loads(message)
        (_,) = Path("/proc/self/task").iterdir()  # other threads would be lost by a fork
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                _place_files(files, task.files)
                return task
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        channel.send(os.read(reading, _MAX_BYTES))
        for file in (reading, writing, *files):
            os.close(file)


def _place_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives descriptors their numbers, and closes all others but those of standard streams."""
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, _FIRST_FREE_FILE) for file in files]
    os.closerange(3, _FIRST_FREE_FILE)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _run(task: _Task) -> None:
    if task.has_session:
        os.setsid()
    while os.getppid() != task.parent:  # until the process between has ended
        time.sleep(0.001)
    end_with_parent()
    os.chdir(task.folder)
    os.environ.clear()
    os.environ.update(task.environment)
    sys.path[:] = task.path
    sys.argv[:] = [task.module, *task.arguments]
    runpy.run_module(task.module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Serves the starter, whose socket is the first argument."""
    gc.disable()
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    channel = socket.socket(fileno=int(sys.argv[1]))
    task = _serve(channel)
    channel.detach()
    _run(task)


if __name__ == "__main__":
    main()
