"""The number of threads of a worker, and the wait policy of torch's threads."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_child_processes_have_the_same_wait_policy(given, policy):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    assert variable_of_child("OMP_WAIT_POLICY", environment) == policy


def variable_of_child(name, environment):
    module = "tests.support.print_variable"
    result = subprocess.run(
        [sys.executable, "-m", "worker.processes.child", str(os.getpid()), module, name],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return result.stdout.strip()


def test_files_of_the_working_folder_do_not_shadow_packages_of_a_child(tmp_path):
    (tmp_path / "tests.py").write_text("raise SystemExit('the wrong module')")
    project = str(Path(__file__).parents[4])
    # An empty entry would be the working folder.
    paths = [path for path in (project, os.environ.get("PYTHONPATH")) if path]
    child = ["worker.processes.child", str(os.getpid()), "tests.support.print_variable", "HOME"]
    result = subprocess.run(
        [sys.executable, "-P", "-m", *child],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert result.returncode == 0, result.stderr
