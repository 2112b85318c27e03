"""Checks the exchange between the ranks of one engine (`--tensor-parallel-size`).

`python -m baton.doctor.ranks` is the self-test: two processes add up numbers through shared memory.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import kernels
from baton.common.errors import BatonError
from baton.common.module_process import module_command
from baton.doctor import Finding, Level
from baton.doctor.native_kernels import find_self_test
from kernels.library import library

__all__ = ["check_ranks", "main"]

_SIZE = 768
_REPEATS = 2000
_TIMEOUT_S = 30.0


def check_ranks() -> Iterator[Finding]:
    """Reports whether processes of this machine can compute one model together."""
    if library.select().path is None or not hasattr(os, "memfd_create"):
        text = "not checked: several ranks need Linux and the native kernels"
        yield Finding("ranks", Level.NOTE, text)
    else:
        yield from find_self_test("ranks", "baton.doctor.ranks")


def main(arguments: Sequence[str]) -> int:
    """Runs one of the two processes, the second one with arguments; returns its exit status."""
    from kernels.library.commands import library as native_library
    from kernels.native.ranks import SharedMemoryRanks

    native = native_library()
    assert native is not None, "`check_ranks` has looked"
    kernels.set_num_threads(1)
    if arguments:
        _add_up(SharedMemoryRanks(native, int(arguments[0]), 1, 2))
        return 0
    file = os.memfd_create("doctor-ranks")
    command = module_command("baton.doctor.ranks", str(file))
    with subprocess.Popen(command, pass_fds=(file,)) as other:
        try:
            seconds = _add_up(SharedMemoryRanks(native, file, 0, 2))
        except (BatonError, RuntimeError) as error:
            other.kill()
            sys.stderr.write(f"{error}\n")
            return 1
    print(f"two processes add up {_SIZE} numbers in {seconds * 1e6:.1f} us")
    return 0


def _add_up(ranks: "kernels.RankGroup") -> float:
    """Adds up numbers many times; returns the seconds of one time.

    Raises:
        RuntimeError: the sum is wrong, or the other process does not answer.
    """
    import torch

    ranks.limit_waits(_TIMEOUT_S)
    own = torch.full((1, _SIZE), float(1 + ranks.rank))
    ranks.all_reduce(own)  # waits for the start of the other process
    began = time.perf_counter()
    for _ in range(_REPEATS):
        total = ranks.all_reduce(own)
    seconds = (time.perf_counter() - began) / _REPEATS
    if not torch.equal(total, torch.full((1, _SIZE), 3.0)):
        raise RuntimeError("a sum over two processes is wrong")
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
