"""`Backend`: where a `kvstore.mover.mover.StagedMover` brings blocks, and takes them from."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.jobs import LoadJob, SaveJob
from kvstore.slot import Slot
from kvstore.store import GetStatus, StoreUnavailableError

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
        """Whether the parts of a slot may lie apart, the payload in a pool.

        Then nothing reads or writes slots after a call, also if it fails, unless it raises
        `InDoubtError`; and a slot whose object is put is left as it is. Otherwise each slot has
        its `whole`.
        """

    def num_held(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks need not be put, for others have done so."""

    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Takes sealed blocks of a job; the slots are the caller's again afterwards."""

    def fetch(
        self, job: LoadJob, keys: Sequence[bytes], slots: Sequence[Slot]
    ) -> Sequence[GetStatus]:
        """Fills slots with sealed blocks; nothing writes to them afterwards.

        Raises:
            InDoubtError: something may still write to them. The mover then uses the slots, and
                the blocks of the pool, for nothing else until `has_settled`.
        """

    def discard(self, key: bytes) -> None:
        """What was fetched under a key is corrupt: it should not be found again."""
