"""What this machine's memory allows: copies and digests of bytes that are in no cache."""

import ctypes
import time

import numpy as np
import xxhash

from benchmarks.kernels.timing import last_level_cache_bytes

__all__ = ["ColdMemory"]

_CACHES = 4


class ColdMemory:
    """Two buffers far larger than a cache; calls go through them piece by piece, and round.

    Args:
        most_bytes: of a call.
        least_bytes: of a buffer; 0 for as many as the machine's caches ask for.
    """

    def __init__(self, most_bytes: int, least_bytes: int = 0) -> None:
        num_bytes = max(most_bytes, least_bytes or _CACHES * last_level_cache_bytes())
        self._source = np.full(num_bytes, 1, np.uint8)  # written to: the pages are there
        self._target = np.full(num_bytes, 2, np.uint8)
        self._at = 0

    def copy_s(self, num_bytes: int) -> float:
        """Seconds that one thread takes to copy so many bytes by `memcpy`."""
        at = self._next(num_bytes)
        source, target = self._source.ctypes.data + at, self._target.ctypes.data + at
        began_at = time.perf_counter()
        ctypes.memmove(target, source, num_bytes)
        return time.perf_counter() - began_at

    def digest_s(self, num_bytes: int) -> float:
        """Seconds that one thread takes for the digest of so many bytes, as connectors make it."""
        at = self._next(num_bytes)
        view = self._source.data[at : at + num_bytes]
        began_at = time.perf_counter()
        xxhash.xxh3_128_digest(view)
        return time.perf_counter() - began_at

    def _next(self, num_bytes: int) -> int:
        """Where the next so many bytes begin, on which nobody has been for long."""
        if self._at + num_bytes > len(self._source):
            self._at = 0
        at, self._at = self._at, self._at + num_bytes
        return at
