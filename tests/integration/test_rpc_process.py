"""Server processes end without an error on a signal that arrives while they start, and no SIGHUP
ends them.
"""

import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

END_TIMEOUT_S = 15  # a busy machine; a process that waits for its load would never end
FLAGS = {
    "router": ("--decode=127.0.0.1:1", "--grpc-port=0"),
    "prefill": ("--kv-connector=shm://hanging-start",),
    "decode": (),
}


@contextmanager
def starting(command):
    """A process that loads without end."""
    arguments = [command, "--model=some/model", "--port=0", *FLAGS[command]]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.hanging_start", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout.readline() == "loading\n"
            yield process
        finally:
            process.kill()


def ignored_signals(pid: int) -> set[int]:
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigIgn:")
    )
    mask = int(line.split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", FLAGS)
def test_a_signal_while_the_model_loads_ends_the_process(command, number):
    with starting(command) as process:
        assert signal.SIGHUP in ignored_signals(process.pid)
        process.send_signal(number)
        _, log = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 0, log
    assert "stopped while starting" in log
    assert "Traceback" not in log
