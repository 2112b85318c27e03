"""The native kernels where the system refuses memory or threads: an error, then on as before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernel_checks import native_only

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]


@native_only("torch's memory and threads are torch's matter")
@pytest.mark.skipif(sys.platform != "linux", reason="others do not limit a process's memory")
@pytest.mark.parametrize("refused", ["attention", "threads"])
def test_a_refusal_of_the_system_is_an_error_and_the_process_continues(refused):
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
