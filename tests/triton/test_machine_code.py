"""What kernels become on a Hopper card: registers, spills, shared memory, the widths of loads, and
instructions. These tests need no GPU; on a GPU they are skipped.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.devices import IS_CUDA

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(IS_CUDA, reason="the code that is compiled there runs there"),
]


def machine_code(folder, *names):
    """Compiles cases in a process without the interpreter; returns case -> its kernels' fields."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder)}
    del environment["TRITON_INTERPRET"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.machine_code", "NVIDIA H200", *names],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def count(code, *parts):
    """Returns how many instructions have all of these parts in their names."""
    return sum(all(part in name for part in parts) for name in code["instructions"])


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return machine_code(tmp_path_factory.mktemp("triton"), "few rows", "decode, 8-bit floats")


@pytest.fixture(scope="module")
def few_rows(cases):
    """Of 4,096 inputs: with a norm, with a residual, and gated with a norm."""
    return cases["few rows"]


def test_few_rows_are_one_kernel_for_any_number_of_them(few_rows):
    assert [code["kernel"] for code in few_rows] == ["_few_rows_kernel"] * 3


def test_few_rows_read_weights_in_words_of_16_bytes_ahead_of_their_use(few_rows):
    for code in few_rows:
        loads = Counter(name for name in code["instructions"] if name.startswith("LDGSTS"))
        assert loads
        assert all("128" in name for name in loads), loads
        assert count(code, "HMMA.16816")
        assert code["stack_bytes"] == 0
        assert code["registers"] <= 128
    # Of a multiprocessor's 228 KiB: four programs at a time, or two of gated products.
    assert [code["shared_bytes"] <= 56 * 1024 for code in few_rows] == [True, True, False]
    assert few_rows[2]["shared_bytes"] <= 113 * 1024


def test_few_rows_prefetch_weights_before_they_wait_and_wait_before_they_let_go(few_rows):
    for code in few_rows:
        names = [name.split(".")[0] for name in code["instructions"]]
        wait, release = names.index("ACQBULK"), names.index("PREEXIT")
        assert wait < release < names.index("LDGSTS")
        assert "CCTL" in names[:wait]
        assert {"LDG", "LDGSTS", "STG"}.isdisjoint(names[:wait])


def test_8_bit_floats_of_kv_are_widened_by_integers(cases):
    """The loop over contexts takes registers, too: two programs have room, not three."""
    (attend,) = [code for code in cases["decode, 8-bit floats"] if "attend" in code["kernel"]]
    assert count(attend, "HMUL2.BF16") + count(attend, "HFMA2", "BF16")
    assert count(attend, "F2F.") == count(attend, "E4M3") == 0
    assert attend["registers"] <= 248  # of two programs of 128 threads
    assert attend["stack_bytes"] == 0
