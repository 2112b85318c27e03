"""The test parts of `make gpu-first`, on tests that pass, fail, crash and hang, on the CPU."""

import json
import subprocess
import time

import pytest

from scripts import gpu_tests as gpu_suite

_MIXED = """
import os
import pytest

def test_device():
    assert os.environ["BATON_TEST_DEVICE"] == "cpu"

def test_wrong():
    assert 1 == 2

@pytest.mark.skip(reason="needs a comet")
def test_rare():
    pass

@pytest.fixture
def broken():
    raise RuntimeError("no such thing")

def test_set_up(broken):
    pass

@pytest.mark.slow
def test_combination():
    pass
"""
_CRASH = """
import os

def test_before():
    pass

def test_fatal():
    os.abort()
"""
PASSED = {"test": "test_one", "outcome": "passed", "seconds": 1.0}


def write(folder, **contents):
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / f"test_{name}.py").write_text(content)
    return folder


def names_of(messages):
    return sorted(name.rpartition("::")[2] for name in messages)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    kernels = write(folder / "kernels", mixed=_MIXED, crash=_CRASH)
    runtime = write(folder / "runtime", syntax="def test_(:")
    path = folder / "report.json"
    paths = [kernels, runtime / "test_syntax.py"]
    report = gpu_suite.run_suite(paths, "not slow", 2, "cpu", 100, path)
    assert json.loads(path.read_text()) == report
    return report


@pytest.mark.slow
def test_every_outcome_is_counted(report):
    assert report["counts"] == {"passed": 2, "failed": 4, "skipped": 1}
    assert not report["all_passed"]


@pytest.mark.slow
def test_failures_are_named_with_their_messages(report):
    assert names_of(report["failures"]) == ["", "test_fatal", "test_set_up", "test_wrong"]
    messages = "\n".join(report["failures"].values())
    for part in (
        "assert 1 == 2",
        "no such thing",
        "SyntaxError",
        "during this test: pytest ended with status -6",
    ):
        assert part in messages


@pytest.mark.slow
def test_a_process_that_ends_early_is_reported_as_a_problem_of_its_file(report):
    crashed = [name for name, text in report["problems"].items() if "status -6" in text]
    assert len(crashed) == 1
    assert "test_crash.py (not slow)" in crashed[0]


@pytest.mark.slow
def test_skipped_tests_are_named_with_their_reasons(report):
    assert names_of(report["skipped"]) == ["test_rare"]
    assert "needs a comet" in "".join(report["skipped"].values())


@pytest.mark.slow
def test_slow_tests_run_alone(tmp_path):
    folder = write(tmp_path, mixed=_MIXED, crash=_CRASH)
    report = gpu_suite.run_suite([folder], "slow", 2, "cpu", 100, tmp_path / "report.json")
    assert [run["file"].rpartition("/")[2] for run in report["files"]] == ["test_mixed.py"]
    assert report["counts"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert report["all_passed"]


@pytest.mark.slow
def test_the_report_names_the_machine(report):
    machine = report["machine"]
    assert machine["device"] == {"name": "cpu"}
    assert machine["packages"]["torch"]
    assert machine["commit"]
    assert "failed" in gpu_suite.in_words(report)


def test_a_file_for_which_no_time_is_left_is_not_started(tmp_path):
    (file,) = write(tmp_path, quick="def test_one(): pass").glob("*.py")
    run = gpu_suite.run_file(file, marks="not slow", device="cpu", ends_at=time.monotonic())
    assert run.problem == "not started: no time was left"
    assert not gpu_suite.summarize([run], is_finished=True)["all_passed"]


def test_an_interrupted_run_writes_the_results_so_far(tmp_path, monkeypatch):
    passed = gpu_suite.FileRun("one", "not slow", 1.0, [PASSED])

    def run_file(file, **settings):
        if file.parent.name == "runtime":
            raise KeyboardInterrupt
        return passed

    monkeypatch.setattr(gpu_suite, "run_file", run_file)
    kernels = write(tmp_path / "kernels", one="")
    runtime = write(tmp_path / "runtime", two="")
    path = tmp_path / "report.json"
    with pytest.raises(KeyboardInterrupt):
        gpu_suite.run_suite([kernels, runtime], "not slow", 1, "cpu", 100, path)
    report = json.loads(path.read_text())
    assert report["counts"]["passed"] == 1
    assert not report["finished"]
    assert not report["all_passed"]


@pytest.fixture
def stuck(tmp_path, monkeypatch):
    """The text of a test that hangs; the time of processes runs out once it does, however long they
    take to start.
    """
    begun = tmp_path / "begun"

    class Process(subprocess.Popen):
        def wait(self, timeout=None):
            while timeout is not None and not begun.exists() and self.poll() is None:
                time.sleep(0.05)
            return super().wait(timeout and 0.1)

    monkeypatch.setattr(subprocess, "Popen", Process)
    return f"""
import pathlib, threading

def test_stuck():
    pathlib.Path({str(begun)!r}).touch()
    threading.Event().wait()
"""


@pytest.mark.slow
def test_a_test_that_hangs_is_ended_and_named(tmp_path, stuck):
    (file,) = write(tmp_path, hangs=stuck).glob("*.py")
    ends_at = time.monotonic() + 100
    run = gpu_suite.run_file(file, marks="not slow", device="cpu", ends_at=ends_at)
    assert run.problem == "ended: time ran out"
    (test,) = run.tests
    assert test["test"].endswith("test_stuck")
    assert test["outcome"] == "failed"
