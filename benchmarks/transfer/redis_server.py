"""A Redis server of a run's own: without persistence, on a free port."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["REDIS_SERVER", "running_redis"]

REDIS_SERVER = "redis-server"

_START_S = 20.0
_STOP_S = 10.0
_POLL_S = 0.02


@contextmanager
def running_redis() -> Iterator[str]:
    """Its URL, `redis://127.0.0.1:PORT/0`.

    Raises:
        RuntimeError: it is not installed, or does not start.
    """
    executable, port = shutil.which(REDIS_SERVER), _free_port()
    if executable is None:
        raise RuntimeError(f"{REDIS_SERVER} is not on PATH")
    command = [executable, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(
        [*command, "--appendonly", "no", "--loglevel", "warning"], stdout=subprocess.DEVNULL
    )
    try:
        _await_listening(process, port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_listening(process: subprocess.Popen[bytes], port: int) -> None:
    give_up_at = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < give_up_at:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(_POLL_S)
        else:
            return
    raise RuntimeError(f"{REDIS_SERVER} does not start")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
