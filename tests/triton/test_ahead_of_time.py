"""Every kernel compiles for Hopper cards as models launch it; the interpreter accepts more.

These tests need no GPU; on a GPU they are skipped, as the other tests compile the kernels there.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.devices import IS_CUDA
from tests.support.launch_cases import CASES

ROOT = Path(__file__).parents[2]
MAX_SHARED_BYTES = 227 * 1024  # of a Hopper card's program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(IS_CUDA, reason="the other tests compile here"),
]


def compiled(names, tmp_path):
    """Compiles cases in a process without the interpreter; returns case -> (kernel, bytes)."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.launch_cases", "NVIDIA H200", *names],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.mark.timeout(510)
def test_kernels_compile_and_fit_in_shared_memory(tmp_path):
    for name, kernels in compiled([*CASES], tmp_path).items():
        assert kernels, name
        for kernel, shared_bytes in kernels:
            assert shared_bytes <= MAX_SHARED_BYTES, (name, kernel)


def test_no_kernel_is_compiled_again_for_another_number_of_rows(tmp_path):
    """Values that change from step to step, and a search's pass, are no compile-time constants."""
    kernels = compiled(["thresholds", "rules", "rows"], tmp_path)
    searches = Counter(name for name, _ in kernels["thresholds"])
    assert searches == {
        "_search_kernel": 2,
        "_gather_kernel": 2,
        "_settle_kernel": 2,
    }  # of top-k and of top-p
    rules = Counter(name for name, _ in kernels["rules"])
    assert rules == {"_mark_kernel": 1, "_change_kernel": 1, "_find_kernel": 1}
    assert Counter(name for name, _ in kernels["rows"])["_keep_drawn_kernel"] == 1
