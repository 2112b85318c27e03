"""How many threads workers compute on, and how torch's wait."""

import argparse
import os
import subprocess
import sys

import pytest

import kernels
from baton.cli import main, up
from baton.machine_limits import usable_cores

pytestmark = pytest.mark.alone


def engine_of_up(*flags):
    parser = argparse.ArgumentParser()
    up.add_args(parser)
    return up._config_from_args(parser.parse_args(flags), "shm://x").engine


@pytest.mark.parametrize("num_workers", ["1", "5"])
def test_each_worker_computes_on_all_cores_however_many_there_are(num_workers):
    assert engine_of_up("--decode", num_workers).num_threads is None
    assert kernels.default_num_threads() == usable_cores()


def test_a_number_that_is_asked_for_is_each_workers():
    assert engine_of_up("--decode", "2", "--num-threads", "3").num_threads == 3


def test_the_command_line_comes_before_torch():
    code = "import sys, baton.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_torchs_threads_wait_passively_unless_told_otherwise(monkeypatch, given, policy):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # puts it back, too
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == policy


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_children_wait_so_too(given, policy):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    module = "tests.support.print_wait_policy"
    result = subprocess.run(
        [sys.executable, "-m", "baton.up.child", str(os.getpid()), module],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert result.stdout.strip() == policy
