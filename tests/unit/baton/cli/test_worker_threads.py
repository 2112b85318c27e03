"""The number of threads of a worker, and the wait policy of torch's threads."""

import argparse
import os
import subprocess
import sys

import pytest

import kernels
from baton.cli import main, serve
from baton.cli.serve_config import cluster_config_from_args
from baton.common.machine_limits import usable_cores


def engine_of_serve(*flags):
    parser = argparse.ArgumentParser()
    serve.add_args(parser)
    return cluster_config_from_args(parser.parse_args(flags), "shm://x").engine


@pytest.mark.parametrize("num_workers", ["1", "5"])
def test_each_worker_uses_all_cores_for_any_number_of_workers(num_workers):
    assert engine_of_serve("--decode-workers", num_workers).num_threads is None
    assert kernels.default_num_threads() == usable_cores()


def test_a_given_number_of_threads_applies_to_each_worker():
    assert engine_of_serve("--decode-workers", "2", "--num-threads", "3").num_threads == 3


def test_importing_the_command_line_does_not_import_torch():
    code = "import sys, baton.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_torch_wait_passively_unless_the_environment_sets_a_policy(
    monkeypatch, given, policy
):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # registers the variable for restoration
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == policy
