"""What moves the same bytes without a connector: Redis's own client, nixl by itself.

What this machine's memory allows: copies and digests of bytes that are in no cache.
"""

import ctypes
import time
from abc import ABC, abstractmethod

import numpy as np
import xxhash

from benchmarks.kernels.cache import last_level_cache_bytes
from benchmarks.transfer.backends import Backend
from benchmarks.transfer.ends import Ends

__all__ = ["ColdMemory", "RawMoves", "open_raw"]


class RawMoves(ABC):
    """Moves blocks from the publisher to the reader."""

    @abstractmethod
    def move(self, run_id: str, count: int) -> dict[str, float]:
        """Moves so many blocks.

        Returns:
            Seconds of "raw_save" and "raw_load", as far as there is the like of it.

        Raises:
            RefusedError: others arrived.
        """


def open_raw(backend: Backend, ends: Ends) -> RawMoves:
    """What a connector is measured beside."""
    if backend.raw == "redis":
        return _RedisClient(ends, backend.url)
    if backend.raw:
        return _Nixl(ends, backend.raw)
    return _Nothing()


class _Nothing(RawMoves):
    def move(self, run_id: str, count: int) -> dict[str, float]:
        return {}


class _RedisClient(RawMoves):
    """One connection on either side, and pipelines."""

    def __init__(self, ends: Ends, url: str) -> None:
        self._ends = ends
        for end in (ends.publisher, ends.reader):
            end.call("open_redis", url.partition("?")[0])

    def move(self, run_id: str, count: int) -> dict[str, float]:
        block_ids = self._ends.take(count)
        save_s = self._ends.publisher.call("redis_set", run_id, block_ids)
        load_s, digests = self._ends.reader.call("redis_get", run_id, count)
        self._ends.check(block_ids, digests)
        return {"raw_save": save_s, "raw_load": load_s}


class _Nixl(RawMoves):
    """From pool to pool: the reader reads, or the publisher writes."""

    def __init__(self, ends: Ends, operation: str) -> None:
        self._ends = ends
        self._operation = operation
        published, read = ends.publisher.call("open_nixl"), ends.reader.call("open_nixl")
        mover, other = (ends.reader, published) if self._reads else (ends.publisher, read)
        mover.call("connect_nixl", other[0])
        self._mover, self._address = mover, other[1]

    @property
    def _reads(self) -> bool:
        return self._operation == "read"

    def move(self, run_id: str, count: int) -> dict[str, float]:
        sent = self._ends.take(count)
        landed = self._ends.reader_ids(sent)
        theirs, ours = (sent, landed) if self._reads else (landed, sent)
        arguments = (self._operation, self._address, theirs, ours)
        seconds = self._mover.call("move_by_nixl", *arguments)
        self._ends.check_landed(sent)
        return {"raw_load": seconds}


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
