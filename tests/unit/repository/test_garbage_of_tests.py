"""Garbage that tests leave: tests/conftest.py frees it, and freezes none of it."""

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[2] / "conftest.py"
FIRST = """
import sys
import weakref

import pytest


class Engine:
    pass


@pytest.fixture
def engine():
    made = Engine()
    made.itself = made
    sys.left = weakref.ref(made)
    return made


def test_leaves_a_cycle(engine):
    assert sys.left() is engine
"""
SECOND = """
import gc
import sys


def test_the_cycle_can_be_freed():
    gc.collect()
    assert sys.left() is None
"""


def test_what_fixtures_of_the_last_test_of_a_file_made_is_not_frozen(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
