"""Who ends the container engine that tests have started, with stand-ins for Docker."""

import fcntl
import os
import signal
import subprocess
import tempfile
from contextlib import ExitStack

import pytest

from tests.support import containers
from tests.support.containers import CANNOT_RUN_CONTAINERS, NoContainersError, container_engine
from tests.support.pages import ROOT

PREPARE = """#!/bin/sh
echo "prepare $*" >> "$CALLS"
[ "$1" = --stop ] || { echo no containers here >&2; exit "$STATUS"; }
"""
STARTED_AND_ENDED = ["prepare ", "prepare --stop"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that is on PATH, has the file of those who use the engine, and `calls`."""
    make_program(tmp_path / "prepare", PREPARE)
    monkeypatch.setattr(containers, "_PREPARE", tmp_path / "prepare")
    monkeypatch.setattr(containers, "PATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("STATUS", "0")
    return tmp_path


def make_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def calls_in(folder):
    return (folder / "calls").read_text().splitlines()


def test_an_engine_that_ran_before_runs_on(folder):
    make_program(folder / "docker", "#!/bin/sh\n")
    with container_engine():
        pass
    assert calls_in(folder) == ["prepare "]


def test_the_last_one_that_uses_a_started_engine_ends_it(folder):
    with ExitStack() as other:
        with container_engine():
            make_program(folder / "docker", "#!/bin/sh\n")  # it runs from now on
            other.enter_context(container_engine())
        assert calls_in(folder) == ["prepare "] * 2
    assert calls_in(folder) == ["prepare "] * 2 + ["prepare --stop"]


@pytest.mark.parametrize(
    ("status", "error"), [(CANNOT_RUN_CONTAINERS, NoContainersError), (1, AssertionError)]
)
def test_an_engine_is_ended_without_which_nothing_can_run(folder, monkeypatch, status, error):
    """It may have been started before something else failed."""
    monkeypatch.setenv("STATUS", str(status))
    with pytest.raises(error, match="no containers here"), container_engine():
        pass
    assert calls_in(folder) == STARTED_AND_ENDED


def test_a_forked_process_does_not_keep_the_engine(folder):
    with container_engine():
        pid = os.fork()
        if not pid:
            signal.pause()
            os._exit(0)
    try:
        assert calls_in(folder) == STARTED_AND_ENDED
        with (folder / f"baton-containers-{os.getuid()}").open("a") as users:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_another_process_with_the_number_of_an_engine_is_not_ended(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / "dockerd.pid").write_text(f"{other.pid}\n")
        command = [ROOT / "scripts" / "prepare_containers.sh", "--stop"]
        environment = {**os.environ, "BATON_CONTAINERS": str(tmp_path)}
        subprocess.run(command, env=environment, check=True, timeout=60)
        assert other.poll() is None
        other.kill()
    assert not (tmp_path / "dockerd.pid").exists()
