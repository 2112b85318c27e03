"""The native kernels raise an error if the system refuses memory or threads, and keep working."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernel_checks import native_only

ROOT = Path(__file__).parents[2]


@native_only("torch manages its own memory and threads")
@pytest.mark.skipif(sys.platform != "linux", reason="others do not limit a process's memory")
@pytest.mark.parametrize("refused", ["attention", "threads"])
def test_kernels_raise_and_keep_working_if_memory_or_threads_are_refused(refused):
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.limited_process", refused],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
