"""Copies and digests of many runs of memory in one call; mirrors src/memory_runs.cpp.

Without the interpreter's lock, in the calling thread. No torch.
"""

import ctypes
from array import array
from functools import cache

from kernels.native.library import load

__all__ = ["DIGEST_BYTES", "NativeRuns", "native_runs"]

DIGEST_BYTES = 16


class NativeRuns:
    """The loaded library's functions. Runs are given by their addresses; that there is memory,
    and that it stays, is the caller's duty.

    Args:
        functions: what was loaded.
    """

    def __init__(self, functions: ctypes.CDLL) -> None:
        integer, address = ctypes.c_int64, ctypes.c_void_p
        self._copy = functions.baton_copy_runs
        self._copy.argtypes, self._copy.restype = (integer, *[address] * 3), None
        self._digest = functions.baton_digest_runs
        self._digest.argtypes, self._digest.restype = (integer, *[address] * 5), None

    def copy(self, to: "array[int]", sources: "array[int]", num_bytes: "array[int]") -> None:
        """Copies each source to its place; no two runs overlap.

        Args:
            to: addresses, 8 bytes each.
            sources: likewise.
            num_bytes: of each run, 8 bytes each.
        """
        self._copy(len(num_bytes), _at(to), _at(sources), _at(num_bytes))

    def digest(
        self,
        prefixes: bytes,
        prefix_ends: "array[int]",
        runs: "array[int]",
        num_bytes: "array[int]",
    ) -> bytes:
        """XXH3-128 digests of runs, each behind a prefix of its own.

        Args:
            prefixes: one behind the other.
            prefix_ends: where in them each ends, 8 bytes each.
            runs: addresses, 8 bytes each.
            num_bytes: of each run, 8 bytes each.

        Returns:
            `DIGEST_BYTES` bytes for each.
        """
        digests = ctypes.create_string_buffer(DIGEST_BYTES * len(num_bytes))
        self._digest(len(num_bytes), prefixes, _at(prefix_ends), _at(runs), _at(num_bytes), digests)
        return digests.raw


@cache
def native_runs() -> NativeRuns | None:
    """The library's functions; None where torch serves the CPU.

    Raises:
        ConfigurationError: see `kernels.native.library.select`.
    """
    functions = load()
    return None if functions is None else NativeRuns(functions)


def _at(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]
