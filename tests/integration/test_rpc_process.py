"""Server processes end without an error on a signal that arrives while they start."""

import signal
import subprocess
import sys

import pytest

END_TIMEOUT_S = 15  # a busy machine; a process that waits for its load would never end
FLAGS = {
    "router": ("--decode=127.0.0.1:1", "--grpc-port=0"),
    "prefill": ("--kv-connector=shm://hanging-start",),
    "decode": (),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("command", FLAGS)
def test_a_signal_while_the_model_loads_ends_the_process(command, number):
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
            process.send_signal(number)
            _, log = process.communicate(timeout=END_TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0, log
    assert "stopped while starting" in log
    assert "Traceback" not in log
