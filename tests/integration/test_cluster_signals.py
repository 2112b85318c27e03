"""Signals end a command with a cluster in order: its folders are removed."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from worker.processes.run_folder import SHARED_MEMORY

COMMAND = """
import argparse
import sys

from baton.cli.serve_config import add_cluster_args, running_config

parser = argparse.ArgumentParser()
add_cluster_args(parser)
with running_config(parser.parse_args([])):
    print("ready", flush=True)
    sys.stdin.readline()
"""


def folders_of(pid: int) -> list[Path]:
    parents = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    return [folder for parent in parents for folder in parent.glob(f"baton-up-{pid}-*")]


def start(*prefix: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert folders_of(process.pid)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_the_folders(number):
    with start() as process:
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    assert not folders_of(process.pid)


def test_a_signal_that_the_shell_has_set_to_be_ignored_stays_ignored():
    with start("nohup") as process:
        process.send_signal(signal.SIGHUP)
        process.communicate("\n", timeout=20)
        assert process.returncode == 0
    assert not folders_of(process.pid)
