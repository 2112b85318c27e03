"""Copies and digests of many runs of memory in one call; mirrors src/memory_runs.cpp.

The calls run in the calling thread without the GIL. This module does not import torch.
"""

import ctypes
from array import array
from functools import cache

from kernels.library.library import load

__all__ = ["DIGEST_BYTES", "NativeRuns", "native_runs"]

DIGEST_BYTES = 16


class NativeRuns:
    """The library's functions on runs of memory.

    Runs are passed as addresses; the caller keeps their memory valid during the call.

    Args:
        functions: the loaded library.
    """

    def __init__(self, functions: ctypes.CDLL) -> None:
        integer, address = ctypes.c_int64, ctypes.c_void_p
        self._copy = functions.baton_copy_runs
        self._copy.argtypes, self._copy.restype = (integer, *[address] * 3), None
        self._digest = functions.baton_digest_runs
        self._digest.argtypes, self._digest.restype = (integer, *[address] * 5), None

    def copy(self, to: "array[int]", sources: "array[int]", num_bytes: "array[int]") -> None:
        """Copies each source to its target; no two runs may overlap.

        Args:
            to: addresses of the targets, 8 bytes each.
            sources: addresses of the sources, 8 bytes each.
            num_bytes: lengths of the runs, 8 bytes each.
        """
        self._copy(len(num_bytes), _at(to), _at(sources), _at(num_bytes))

    def digest(
        self,
        prefixes: bytes,
        prefix_ends: "array[int]",
        runs: "array[int]",
        num_bytes: "array[int]",
    ) -> bytes:
        """Computes the XXH3-128 digest of each run preceded by its prefix.

        Args:
            prefixes: all prefixes, concatenated.
            prefix_ends: end of each prefix in `prefixes`, 8 bytes each.
            runs: addresses of the runs, 8 bytes each.
            num_bytes: lengths of the runs, 8 bytes each.

        Returns:
            The digests, `DIGEST_BYTES` bytes each, concatenated.
        """
        digests = ctypes.create_string_buffer(DIGEST_BYTES * len(num_bytes))
        self._digest(len(num_bytes), prefixes, _at(prefix_ends), _at(runs), _at(num_bytes), digests)
        return digests.raw


@cache
def native_runs() -> NativeRuns | None:
    """Returns the library's functions; None if torch serves the CPU.

    Raises:
        ConfigurationError: see `kernels.library.library.select`.
    """
    functions = load()
    return None if functions is None else NativeRuns(functions)


def _at(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]
