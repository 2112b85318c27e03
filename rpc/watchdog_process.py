"""`python watchdog_process.py PID LIMIT_S`: ends its parent if that does not run its event loop.

The parent writes a byte to standard input now and then. Time counts only while both processes run:
a machine that sleeps, a container that is paused, and a parent that is stopped alone lose nothing.
This file imports little and nothing of Baton, since each worker has such a process.
"""

import os
import select
import signal
import sys
import time

_NUM_TICKS = 60
"""Of a limit. A pause of the machine, however long, counts as at most one tick."""
_MAX_READ_BYTES = 4096
_DUMP_TIMEOUT_S = 5.0


def main(pid: int, limit_s: float) -> None:
    """Watches the parent until it ends, closes standard input, or has to be ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent may drain
        signal.signal(number, signal.SIG_IGN)
    num_ticks = 0
    while os.getppid() == pid and num_ticks < _NUM_TICKS:
        readable, _, _ = select.select([0], [], [], limit_s / _NUM_TICKS)
        if readable:
            if not os.read(0, _MAX_READ_BYTES):
                return
            num_ticks = 0
        elif not _is_stopped(pid):
            num_ticks += 1
    if os.getppid() == pid:
        _end(pid, limit_s)


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process, as far as the system says."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib is not loaded
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


def _end(pid: int, limit_s: float) -> None:
    """Lets a process log its stacks and end, or kills it.

    Returns without that if both have hung in writes to a log without a reader, and go on now. The
    parent then starts another watchdog.
    """
    sys.stderr.write(f"The event loop of process {pid} has not run for {limit_s:g} s; ending it\n")
    sys.stderr.flush()
    if select.select([0], [], [], limit_s / _NUM_TICKS)[0]:
        return
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + _DUMP_TIMEOUT_S
    while time.monotonic() < deadline:
        if os.getppid() != pid:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
