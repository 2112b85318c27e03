"""`Backend`: where a `kvstore.mover.mover.BlockMover` puts blocks, and fetches them from."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.jobs import LoadJob, SaveJob
from kvstore.store import GetStatus, KvObject, StoreUnavailableError

__all__ = ["Backend", "InDoubtError"]


class InDoubtError(StoreUnavailableError):
    """A fetch failed, and something may still write to the memory of its objects.

    Attributes:
        has_settled: returns whether nothing can write there any more. It does not block, because
            the mover calls it often. When its result changes, the backend wakes the engine.
    """

    def __init__(self, message: str, has_settled: Callable[[], bool]) -> None:
        super().__init__(message)
        self.has_settled = has_settled


class Backend(Protocol):
    """Stores and fetches objects for a mover. I/O threads call it, several at once.

    Every method ends in bounded time, and raises `StoreUnavailableError` if it failed. Payloads
    may lie in the pool: once a method has returned or raised, the backend neither reads nor
    writes the memory of the objects, unless it raised `InDoubtError`.
    """

    def num_held(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading objects need not be put, because the backend has them."""

    def put(self, job: SaveJob, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        """Stores sealed objects of a job; does not write to their memory."""

    def fetch(
        self, job: LoadJob, keys: Sequence[bytes], objects: Sequence[KvObject]
    ) -> Sequence[GetStatus]:
        """Reads sealed objects into memory; returns the status of each.

        Raises:
            InDoubtError: something may still write to the memory. The mover then uses it, and
                the blocks of the pool, for nothing else until `has_settled`.
        """

    def discard(self, key: bytes) -> None:
        """Removes an object that was fetched and is corrupt."""
