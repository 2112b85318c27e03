"""A real redis-server for tests: on a free port, without persistence, stoppable and pausable."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis import AuthenticationError, Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

__all__ = ["RedisServer", "running_redis_server"]

_START_DEADLINE_S = 20.0
_STOP_DEADLINE_S = 10.0
_POLL_S = 0.01


class RedisServer:
    """One server process; it keeps its port over restarts, and loses its data.

    Attributes:
        port: where it listens, on 127.0.0.1.
        url: `redis://127.0.0.1:PORT/0`.
    """

    def __init__(self, *arguments: str) -> None:
        executable = shutil.which("redis-server")
        if executable is None:
            pytest.fail("redis-server is not on PATH; on Debian: apt-get install redis-server")
        self.port = _free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            executable, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning", *arguments,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process and waits until it answers."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + _START_DEADLINE_S
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"redis-server ended with status {self._process.returncode}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"redis-server does not answer after {_START_DEADLINE_S} s")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ends the process in good order; nothing to do if it has ended."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the process at once, as a crash does."""
        self._running.kill()
        self._running.wait(_STOP_DEADLINE_S)

    def pause(self) -> None:
        """Stops the process, so that it holds its connections and answers nothing."""
        self._running.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused process go on."""
        self._running.send_signal(signal.SIGCONT)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("redis-server has not been started")
        return self._process

    def _answers(self) -> bool:
        client = Redis(port=self.port, socket_timeout=1, retry=Retry(NoBackoff(), 0))
        with client:
            try:
                return bool(client.ping())
            except AuthenticationError:
                return True
            except RedisError:
                return False


@contextmanager
def running_redis_server(*arguments: str) -> Iterator[RedisServer]:
    """A running server, with more command line arguments; stopped at the end."""
    server = RedisServer(*arguments)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
