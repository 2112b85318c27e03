"""`python -m tests.support.full_log_process LIMIT_S`: a process whose log is not read for a while.

The pipe of its log is full, so its event loop and its watchdog hang in a write until the log is
read again. It prints "running" if the watchdog lets it run on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import rpc.watchdog_process


def full_pipe() -> tuple[int, int]:
    """Returns the ends of a pipe that has no room left."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for length in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, bytes(length))
    os.set_blocking(write_end, True)
    return read_end, write_end


def main(limit_s: float) -> None:
    read_end, write_end = full_pipe()
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    command = (sys.executable, rpc.watchdog_process.__file__, str(os.getpid()), str(limit_s))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=write_end, bufsize=0) as watchdog:
        assert watchdog.stdin is not None
        time.sleep(2 * limit_s)  # the event loop hangs
        watchdog.stdin.write(b".")  # it runs again, since its line is the first to be read
        os.read(read_end, 1 << 16)
        for _ in range(10):
            time.sleep(limit_s / 10)
            with contextlib.suppress(BrokenPipeError):
                watchdog.stdin.write(b".")
    print("running")


if __name__ == "__main__":
    main(float(sys.argv[1]))
