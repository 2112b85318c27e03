"""How quickly connectors move blocks between pools, beside memcpy, digests, redis-py and nixl."""

import ctypes
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from typing_extensions import override

from benchmarks.kernels.timing import last_level_cache_bytes
from benchmarks.transfer.end_host import TransferRefusedError
from benchmarks.transfer.ends import ChildError, Ends, open_ends
from benchmarks.transfer.plan import Plan, TransferBackend
from kvstore.layout import KvLayout

__all__ = ["ColdMemory", "RawMoves", "measure_moves", "open_raw"]

_CACHES = 4
_PUBLISHER, _READER = "publisher", "reader"


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


def measure_moves(plan: Plan, backends: Sequence[TransferBackend]) -> Iterator[dict[str, Any]]:
    """Yields a row of figures for each shape, connector and number of blocks."""
    num_blocks = max(plan.rounds)
    most_bytes = num_blocks * max(layout.block_bytes for layout in plan.shapes.values())
    memory = ColdMemory(most_bytes, plan.least_cold_bytes)
    for shape, layout in plan.shapes.items():
        for backend in backends:
            facts = {"shape": shape, "block_bytes": layout.block_bytes, "backend": backend.name}
            for count, figures in _measure(plan, backend, layout, memory):
                yield facts | {"num_blocks": count} | figures


def _measure(
    plan: Plan, backend: TransferBackend, layout: KvLayout, memory: ColdMemory
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields figures by number of blocks; after a failure, rows that say why there are none."""
    counts = list(plan.rounds)
    try:
        with open_ends(layout, max(counts), is_shared=backend.is_shared) as ends:
            ends.publisher.call("open", _PUBLISHER, backend.url)
            ends.reader.call("open", _READER, backend.url)
            raw = open_raw(backend, ends)
            while counts:
                num_rounds, num_bytes = plan.rounds[counts[0]], counts[0] * layout.block_bytes
                rounds = [
                    _round(ends, raw, f"{counts[0]}-{index}", counts[0])
                    | {"memcpy": memory.copy_s(num_bytes), "digest": memory.digest_s(num_bytes)}
                    for index in range(1 + num_rounds)
                ]
                yield counts.pop(0), {"lends": backend.lends} | _figures(rounds[1:], num_bytes)
    except (ChildError, TransferRefusedError) as error:
        yield from ((count, {"refused": str(error)}) for count in counts)


def _round(ends: Ends, raw: RawMoves, run_id: str, count: int) -> dict[str, float]:
    """Returns the seconds of each move, and deletes what was moved."""
    block_ids = ends.take_blocks(count)
    save_s, handoff = ends.publisher.call("save", _PUBLISHER, run_id, block_ids)
    load_s = ends.reader.call("load", _READER, handoff, ends.reader_ids(block_ids))
    ends.check_landed(block_ids)
    ends.publisher.call("forget", _PUBLISHER, run_id, count)
    return {"save": save_s, "load": load_s} | raw.move(run_id, count)


def _figures(rounds: Sequence[dict[str, float]], num_bytes: int) -> dict[str, Any]:
    """Returns medians. A ratio is the median of the ratios of the rounds."""
    figures: dict[str, Any] = {}
    for name in rounds[0]:
        seconds = statistics.median(each[name] for each in rounds)
        figures |= {f"{name}_ms": 1e3 * seconds, f"{name}_gb_per_s": num_bytes / seconds / 1e9}
    for name in ("save", "load"):
        for other in ("memcpy", f"raw_{name}"):
            if other in rounds[0]:
                ratios = [each[other] / each[name] for each in rounds]
                figures[f"{name}_to_{other}"] = statistics.median(ratios)
    return figures
