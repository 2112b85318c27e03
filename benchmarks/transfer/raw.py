"""What moves the same bytes without a connector: Redis's own client, nixl by itself."""

from abc import ABC, abstractmethod

from benchmarks.transfer.backends import Backend
from benchmarks.transfer.ends import Ends

__all__ = ["RawMoves", "open_raw"]


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
        return _Nixl(ends)
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
    """The reader reads from the publisher's pool into its own."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        metadata, self._address = ends.publisher.call("open_nixl")
        ends.reader.call("open_nixl")
        ends.reader.call("connect_nixl", metadata)

    def move(self, run_id: str, count: int) -> dict[str, float]:
        sent = self._ends.take(count)
        landed = self._ends.reader_ids(sent)
        seconds = self._ends.reader.call("read_by_nixl", self._address, sent, landed)
        self._ends.check_landed(sent)
        return {"raw_load": seconds}
