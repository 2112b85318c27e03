"""The machine code of attention and its surroundings, compiled for a Hopper card without one.

Each assertion is what the launch table or a kernel's text counts on; none of it measures time.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.triton.launch import load_launch_table
from tests.support.devices import IS_CUDA

ROOT = Path(__file__).parents[2]
HOPPER = load_launch_table("NVIDIA H200")
SHARED_BYTES_OF_SM = 227 * 1024
SHARED_BYTES_OF_SYSTEM = 1024  # of each program
REGISTERS_OF_SM, REGISTERS_AT_ONCE = 65_536, 256  # a warp gets a multiple of these

CASES = ["decode", "decode, sinks", "decode, 8-bit floats", "prompts", "prepare", "thresholds"]
# Warps of a program, and programs of an SM that the plan counts on.
RESIDENT = {
    "decode, narrow heads": (4, 3),
    "drafts of 4": (4, 2),
    "drafts of 15": (4, 2),
    "drafts of 15, wide heads": (8, 1),
    "drafts of 1, latent": (8, 1),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(IS_CUDA, reason="the other tests compile here"),
]


@dataclass
class Code:
    """The fields of `tests.support.machine_code.MachineCode`."""

    kernel: str
    shared_bytes: int
    registers: int
    stack_bytes: int
    instructions: list[str]

    def count(self, *parts):
        """Counts the instructions whose names have all of some parts."""
        return sum(all(part in name for part in parts) for name in self.instructions)

    def num_resident(self, num_warps):
        """The programs for which a streaming multiprocessor has room."""
        of_warp = -(-self.registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        by_registers = REGISTERS_OF_SM // (of_warp * num_warps)
        return min(by_registers, SHARED_BYTES_OF_SM // (self.shared_bytes + SHARED_BYTES_OF_SYSTEM))


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """The kernels of some cases, by case and name."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-m", "tests.support.machine_code", "NVIDIA H200"]
    command += [*CASES, *RESIDENT]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return {
        case: {code["kernel"]: Code(**code) for code in found}
        for case, found in json.loads(result.stdout).items()
    }


def test_programs_that_share_contexts_are_all_resident(codes):
    """A program that waits for another one's end would double the time: all have equal shares."""
    decode = HOPPER.decode_attention.for_size(256)
    code = codes["decode"]["attend_shares_kernel"]
    assert code.num_resident(decode.num_warps) == decode.programs_per_sm == 3
    assert codes["decode, sinks"]["attend_shares_kernel"].num_resident(decode.num_warps) == 3
    narrow = codes["decode, 8-bit floats"]["attend_shares_kernel"]
    assert narrow.num_resident(decode.num_warps) >= 2


@pytest.mark.parametrize("case", RESIDENT)
def test_programs_with_many_rows_are_all_resident(codes, case):
    num_warps, num_programs = RESIDENT[case]
    code = codes[case]["attend_shares_kernel"]
    assert code.num_resident(num_warps) >= num_programs


def test_kernels_keep_their_values_in_registers(codes):
    for case, kernels in codes.items():
        for name, code in kernels.items():
            assert code.stack_bytes == 0, (case, name)


def test_decode_attention_loads_16_bytes_at_a_time_ahead_of_the_products(codes):
    code = codes["decode"]["attend_shares_kernel"]
    # K and V of a tile of 64 tokens: 16 copies of 16 bytes by each of 128 threads, for the first
    # tile, for the second and within the loop.
    assert code.count("LDGSTS", "128") == 48
    assert code.count("HMMA") == 32
    assert code.count("LDG", "U16") == 0


def test_prompts_multiply_by_wgmma(codes):
    code = codes["prompts"]["attend_kernel"]
    assert code.count("HGMMA") == 24
    assert code.count("HMMA") == 0
    assert code.count("LDGSTS", "128") == 48


def test_rotation_loads_and_stores_vectors(codes):
    code = codes["prepare"]["_rotate_and_write_kv_kernel"]
    assert code.count("LDG", "U16") == code.count("STG", "U16") == 0
    assert code.count("STG", "64") == code.count("STG") == 6


def test_a_search_gathers_with_one_addition_per_tile(codes):
    assert codes["thresholds"]["_gather_kernel"].count("ATOM") == 1
