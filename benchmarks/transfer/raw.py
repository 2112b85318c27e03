"""The baselines of the connectors: redis-py alone, nixl alone, memcpy and digests."""

import ctypes
import time
from abc import ABC, abstractmethod

import numpy as np
import xxhash
from typing_extensions import override

from benchmarks.kernels.timing import last_level_cache_bytes
from benchmarks.transfer.backends import TransferBackend
from benchmarks.transfer.ends import Ends

__all__ = ["ColdMemory", "RawMoves", "open_raw"]

_CACHES = 4


class RawMoves(ABC):
    """Moves blocks from the publisher to the reader without a connector."""

    @abstractmethod
    def move(self, run_id: str, count: int) -> dict[str, float]:
        """Moves `count` blocks.

        Returns:
            The seconds of "raw_save" and "raw_load", if the library has such a step.

        Raises:
            RefusedError: other bytes arrived than were sent.
        """


def open_raw(backend: TransferBackend, ends: Ends) -> RawMoves:
    """Returns the baseline of a connector."""
    match backend.raw:
        case "redis":
            return _RedisClient(ends, backend.url)
        case "nixl":
            return _Nixl(ends)
        case _:
            return _Nothing()


class _Nothing(RawMoves):
    @override
    def move(self, run_id: str, count: int) -> dict[str, float]:
        return {}


class _RedisClient(RawMoves):
    """One connection on either side, and pipelines."""

    def __init__(self, ends: Ends, url: str) -> None:
        self._ends = ends
        for end in (ends.publisher, ends.reader):
            end.call("open_redis", url.partition("?")[0])

    @override
    def move(self, run_id: str, count: int) -> dict[str, float]:
        block_ids = self._ends.take_blocks(count)
        save_s = self._ends.publisher.call("redis_set", run_id, block_ids)
        load_s, digests = self._ends.reader.call("redis_get", run_id, count)
        self._ends.check(block_ids, digests)
        return {"raw_save": save_s, "raw_load": load_s}


class _Nixl(RawMoves):
    """The reader reads from the publisher's pool into its own."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        metadata, self._address = ends.publisher.call("open_nixl")
        ends.reader.call("open_nixl")
        ends.reader.call("connect_nixl", metadata)

    @override
    def move(self, run_id: str, count: int) -> dict[str, float]:
        sent = self._ends.take_blocks(count)
        landed = self._ends.reader_ids(sent)
        seconds = self._ends.reader.call("read_by_nixl", self._address, sent, landed)
        self._ends.check_landed(sent)
        return {"raw_load": seconds}


class ColdMemory:
    """Two buffers far larger than a cache. Each call uses the next part of them.

    Args:
        most_bytes: size of the largest call.
        least_bytes: least size of a buffer; 0 for four last-level caches.
    """

    def __init__(self, most_bytes: int, least_bytes: int = 0) -> None:
        num_bytes = max(most_bytes, least_bytes or _CACHES * last_level_cache_bytes())
        self._source = np.full(num_bytes, 1, np.uint8)  # writing makes the system provide pages
        self._target = np.full(num_bytes, 2, np.uint8)
        self._at = 0

    def copy_s(self, num_bytes: int) -> float:
        """Returns the seconds in which one thread copies `num_bytes` by `memcpy`."""
        at = self._next(num_bytes)
        source, target = self._source.ctypes.data + at, self._target.ctypes.data + at
        began_at = time.perf_counter()
        ctypes.memmove(target, source, num_bytes)
        return time.perf_counter() - began_at

    def digest_s(self, num_bytes: int) -> float:
        """Returns the seconds in which one thread computes the digest that connectors use."""
        at = self._next(num_bytes)
        view = self._source.data[at : at + num_bytes]
        began_at = time.perf_counter()
        xxhash.xxh3_128_digest(view)
        return time.perf_counter() - began_at

    def _next(self, num_bytes: int) -> int:
        """Returns the offset of the part that was used the longest time ago."""
        if self._at + num_bytes > len(self._source):
            self._at = 0
        at, self._at = self._at, self._at + num_bytes
        return at
