"""`Backend`: where a `kvstore.mover.mover.BlockMover` brings blocks, and takes them from."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.jobs import LoadJob, SaveJob
from kvstore.store import GetStatus, KvObject, StoreUnavailableError

__all__ = ["Backend", "InDoubtError"]


class InDoubtError(StoreUnavailableError):
    """A fetch failed, and something may still write to its slots.

    Attributes:
        has_settled: whether nothing can any more; asked often, so it does not block. When that
            changes, the mover's `poll` has news.
    """

    def __init__(self, message: str, has_settled: Callable[[], bool]) -> None:
        super().__init__(message)
        self.has_settled = has_settled


class Backend(Protocol):
    """Where blocks come from and go to. Called in I/O threads, several at once.

    Every method ends in bounded time, and raises `StoreUnavailableError` where
    it could not do what it should.
    """

    @property
    def takes_frames(self) -> bool:
        """Whether payloads may lie in a pool.

        Then nothing reads or writes objects' memory after a call, also if it fails, unless it
        raises `InDoubtError`; and an object that is put is not written to.
        """

    def num_held(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks need not be put, for others have done so."""

    def put(self, job: SaveJob, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        """Takes sealed blocks of a job; the slots are the caller's again afterwards."""

    def fetch(
        self, job: LoadJob, keys: Sequence[bytes], objects: Sequence[KvObject]
    ) -> Sequence[GetStatus]:
        """Fills slots with sealed blocks; nothing writes to them afterwards.

        Raises:
            InDoubtError: something may; the mover uses a segment's slots for nothing else until
                then, or for long enough, and trusts nothing that lies in them after that. A
                pool's blocks stay the job's until then, however long that is.
        """

    def discard(self, key: bytes) -> None:
        """What was fetched under a key is corrupt: it should not be found again."""
