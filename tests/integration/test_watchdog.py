"""A process whose event loop hangs ends; one that was paused goes on."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

LIMIT_S = 2.0
END_TIMEOUT_S = 30


FIRST_OF_A_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child")


@pytest.fixture
def watched() -> Iterator[subprocess.Popen[str]]:
    with running() as process:
        yield process


@contextmanager
def running(*prefix: str) -> Iterator[subprocess.Popen[str]]:
    command = [*prefix, sys.executable, "-m", "tests.support.watched_process", str(LIMIT_S)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            read_lines(process, 3)
            yield process
        finally:
            process.kill()


def read_lines(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline() == "running\n", process.stderr.read()


def watchdog_of(process: subprocess.Popen[str]) -> psutil.Process:
    (child,) = psutil.Process(process.pid).children()
    return child


@pytest.mark.parametrize("with_watchdog", [False, True], ids=["worker", "container"])
def test_a_process_that_was_paused_for_longer_goes_on(watched, with_watchdog):
    processes = [psutil.Process(watched.pid)] + [watchdog_of(watched)] * with_watchdog
    for process in processes:
        process.suspend()
    time.sleep(1.5 * LIMIT_S)  # the pause itself
    for process in processes:
        process.resume()
    read_lines(watched, 30)
    watched.communicate("end\n", timeout=END_TIMEOUT_S)
    assert watched.returncode == 0


@pytest.mark.parametrize(("what", "function"), [("lock", "hold_global_lock"), ("block", "main")])
def test_a_process_that_hangs_ends_with_its_stacks_in_the_log(watched, what, function):
    began = time.monotonic()
    _, log = watched.communicate(f"{what}\n", timeout=END_TIMEOUT_S)
    assert watched.returncode == signal.SIGUSR2
    assert time.monotonic() - began > LIMIT_S / 2
    assert f"has not run for {LIMIT_S:g} s" in log
    assert f"in {function}" in log


def test_the_first_process_of_a_container_ends_too():
    """Signals without a handler do not reach it."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*FIRST_OF_A_CONTAINER, "true"], check=False).returncode
    ):
        pytest.skip("this user cannot make a namespace of processes")
    with running(*FIRST_OF_A_CONTAINER) as process:
        _, log = process.communicate("lock\n", timeout=END_TIMEOUT_S)
    assert process.returncode == signal.SIGUSR2
    assert "in hold_global_lock" in log


def test_the_watchdog_ends_with_the_process_and_survives_signals_to_the_group(watched):
    watchdog = watchdog_of(watched)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        watchdog.send_signal(number)
    read_lines(watched, 3)
    assert watchdog.is_running()
    watched.kill()
    watched.wait()
    psutil.wait_procs([watchdog], timeout=END_TIMEOUT_S)
    assert not watchdog.is_running() or watchdog.status() == psutil.STATUS_ZOMBIE


def test_a_process_whose_watchdog_is_stopped_ends_in_order(watched):
    watchdog = watchdog_of(watched)
    watchdog.suspend()
    watched.communicate("end\n", timeout=END_TIMEOUT_S)
    assert watched.returncode == 0
    assert not watchdog.is_running()


def test_a_process_whose_log_is_read_again_goes_on():
    command = [sys.executable, "-m", "tests.support.full_log_process", str(LIMIT_S / 2)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=END_TIMEOUT_S, check=False
    )
    assert (result.returncode, result.stdout) == (0, "running\n")


def test_a_watchdog_that_was_killed_is_replaced(watched):
    first = watchdog_of(watched)
    first.kill()
    deadline = time.monotonic() + END_TIMEOUT_S
    while [child.pid for child in psutil.Process(watched.pid).children()] in ([], [first.pid]):
        assert time.monotonic() < deadline
        read_lines(watched, 1)
    _, log = watched.communicate("lock\n", timeout=END_TIMEOUT_S)
    assert "has not run" in log
