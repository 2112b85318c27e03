"""A real redis-server for tests: on its own port, without persistence, stoppable and pausable."""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from redis import AuthenticationError, Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.ports import reserved_port

__all__ = ["RedisServer", "await_true", "running_redis_server"]

_DEADLINE_S = 60.0
"""A demoted master is told so after twelve seconds; a sentinel whose machine has stalled for two
waits for thirty before that.
"""
_STOP_DEADLINE_S = 10.0
_POLL_S = 0.01


class RedisServer:
    """One server process; a restart keeps its port and loses its data.

    Args:
        arguments: further arguments of the command line.
        config: path of its configuration file; empty for none.

    Attributes:
        port: port on 127.0.0.1 that it listens on.
        url: `redis://127.0.0.1:PORT/0`.
    """

    def __init__(self, *arguments: str, config: str = "") -> None:
        executable = shutil.which("redis-server")
        if executable is None:
            pytest.fail("redis-server is not on PATH; on Debian: apt-get install redis-server")
        self.port = reserved_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            executable, *filter(None, [config]), "--port", str(self.port), "--bind", "127.0.0.1",
            "--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning",
            *arguments,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process and waits until it answers."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        await_true(self._answers, "redis-server answers")

    def stop(self) -> None:
        """Ends the process with SIGTERM; does nothing if it has ended or was never started."""
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
        """Stops the process with SIGSTOP: it keeps its connections and answers nothing."""
        self._running.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continues a paused process."""
        self._running.send_signal(signal.SIGCONT)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("redis-server has not been started")
        return self._process

    def _answers(self) -> bool:
        if (status := self._running.poll()) is not None:
            raise RuntimeError(f"redis-server ended with status {status}")
        client = Redis(port=self.port, socket_timeout=1, retry=Retry(NoBackoff(), 0))
        with client:
            try:
                return bool(client.ping())
            except AuthenticationError:
                return True
            except RedisError:
                return False


def await_true(is_true: Callable[[], bool], what: str) -> None:
    """Polls until a condition is true.

    Raises:
        TimeoutError: the condition is false after a minute.
    """
    deadline_s = time.monotonic() + _DEADLINE_S
    while not is_true():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not after {_DEADLINE_S} s: {what}")
        time.sleep(_POLL_S)


@contextmanager
def running_redis_server(*arguments: str, config: str = "") -> Iterator[RedisServer]:
    """Runs a server until the block ends. See `RedisServer` for the arguments."""
    server = RedisServer(*arguments, config=config)
    try:
        server.start()
        yield server
    finally:
        server.stop()
