"""Processes that run modules of Baton's: what they import, and with which environment."""

import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from baton.common.module_process import module_command, path_variable
from baton.common.own_packages import PACKAGES
from baton.common.ray_cluster import AsyncActor, BlockingActor, actor_class
from kernels.library.variants import BUILD_COMMAND

ROOT = Path(__file__).parents[3]
PRINT = "tests.support.print_variable"


def run(command, *, check=True, **options):
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=check, **options
    )


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_they_have_the_wait_policy_of_the_command_line(given, policy):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    command = module_command(PRINT, "OMP_WAIT_POLICY", ends_with_parent=True)
    assert run(command, env=environment).stdout.strip() == policy


def test_files_of_the_working_folder_do_not_shadow_packages(tmp_path):
    (tmp_path / "tests.py").write_text("raise SystemExit('the wrong module')")
    # An empty entry would be the working folder.
    paths = [path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run(module_command(PRINT, "HOME"), cwd=tmp_path, env=variables)


def test_a_process_without_a_living_parent_runs_nothing():
    command = module_command(PRINT, "HOME", ends_with_parent=True)
    nobody = [str(2**22 + 1) if part == str(os.getpid()) else part for part in command]
    assert run(command).stdout
    assert run(nobody).stdout == ""


@pytest.fixture
def beside_others(tmp_path):
    """Python of an editable installation, whose tree is searched last, beside packages of others
    with all names of Baton's.
    """
    venv.create(tmp_path, symlinks=True)
    variables = {"base": str(tmp_path), "platbase": str(tmp_path)}
    site = Path(sysconfig.get_path("purelib", "venv", variables))
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "tree.pth").write_text(f"{ROOT}\n")
    for name in PACKAGES:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("OWNER = 'another'\n")
    return str(tmp_path / "bin" / "python")


def test_packages_of_others_shadow_none_of_batons(beside_others, tmp_path):
    module = "worker.processes.ports"  # does nothing if it is run
    environment = {"HOME": str(tmp_path)}
    options = {"cwd": "/", "env": environment}
    by_name = run([beside_others, "-P", "-m", module], check=False, **options)
    assert "No module named 'worker.processes'" in by_name.stderr
    run([beside_others, *module_command(module)[1:]], **options)
    code = f"import baton, sys; print(*(__import__(name).__file__ for name in {PACKAGES}))"
    files = run([beside_others, "-c", code], **options).stdout.split()
    assert files == [str(ROOT / name / "__init__.py") for name in PACKAGES]
    # Without `baton`, each of the others stays itself.
    code = f"print(*(__import__(name).OWNER for name in {PACKAGES}))"
    assert {*run([beside_others, "-c", code], **options).stdout.split()} == {"another"}


def test_the_command_that_users_are_shown_builds_batons_kernels(beside_others):
    _, *arguments = shlex.split(BUILD_COMMAND)
    page = run([beside_others, *arguments, "--help"], cwd="/", env={}).stdout
    assert "Compile the native kernels" in page


def test_they_can_import_what_their_parent_can(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/one", "", "/two"])
    assert path_variable() == {"PYTHONPATH": os.pathsep.join(["/one", str(Path.cwd()), "/two"])}


class Adder:
    """Wrapped by actors."""

    def add(self, one, other):
        return one + other

    async def add_later(self, one, other):
        return one + other


class FakeRay:
    """Makes actors in this process."""

    def remote(self, kind):
        return kind


async def test_actors_are_of_a_class_of_baton_and_call_what_they_wrap():
    blocking = actor_class(FakeRay(), Adder, BlockingActor)
    assert (blocking.__name__, blocking.__module__) == ("Adder", "baton.common.ray_cluster")
    assert blocking().call("add", 1, 2) == 3
    assert await actor_class(FakeRay(), Adder, AsyncActor)().call("add_later", 1, 2) == 3
