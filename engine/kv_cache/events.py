"""`KvEventLog`: tells followers, a router say, what enters and leaves the prefix cache. Pure.

Keys are the plain block keys, those of layer group 0: whoever hashes a prompt
can look them up. Where a block of the pool is cut into several transfer blocks,
its key is that of the last one. A follower that misses a sequence number, or comes late, asks
for a snapshot: `start_recording` again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["BlocksRemoved", "BlocksStored", "CacheCleared", "KvEvent", "KvEventLog"]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that can be hit from now on.

    Attributes:
        sequence_number: counts events, from 1.
        keys: consecutive blocks of one sequence; in a snapshot, in no order.
        parent: key of the block before them; None where they begin the
            sequence, and in a snapshot.
    """

    sequence_number: int
    keys: tuple[bytes, ...]
    parent: bytes | None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that cannot be hit any longer."""

    sequence_number: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing can be hit any longer."""

    sequence_number: int


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


class KvEventLog:
    """A bounded log of events, empty while nobody records.

    Args:
        cached_keys: gives every key that can be hit now.
        max_pending: beyond so many events not taken, a snapshot replaces them.
    """

    def __init__(
        self, cached_keys: Callable[[], tuple[bytes, ...]], *, max_pending: int = 4096
    ) -> None:
        self.is_recording = False
        self._cached_keys = cached_keys
        self._max_pending = max_pending
        self._pending: list[KvEvent] = []
        self._next_number = 1
        self._needs_snapshot = False

    def start_recording(self) -> tuple[KvEvent, ...]:
        """Records from now on.

        Returns:
            A snapshot: the cache cleared, then all that it holds stored.
        """
        self.is_recording = True
        self._collapse()
        return self.take()

    def stop_recording(self) -> None:
        """Forgets what was not taken, and records no more."""
        self._collapse()
        self.is_recording = self._needs_snapshot = False

    def take(self) -> tuple[KvEvent, ...]:
        """The events since the last call, numbered without a gap."""
        if self._needs_snapshot:
            self._needs_snapshot = False
            self._pending.append(CacheCleared(self._number()))
            self.record_stored(self._cached_keys(), None)
        events, self._pending = tuple(self._pending), []
        return events

    def record_stored(self, keys: Sequence[bytes], parent: bytes | None) -> None:
        """Blocks entered the cache; `parent` as in `BlocksStored`."""
        if self._makes_room() and keys:
            self._pending.append(BlocksStored(self._number(), tuple(keys), parent))

    def record_removed(self, keys: Sequence[bytes]) -> None:
        """Blocks left the cache."""
        if self._makes_room() and keys:
            self._pending.append(BlocksRemoved(self._number(), tuple(keys)))

    def record_cleared(self) -> None:
        """All blocks left the cache."""
        if self._makes_room():
            self._pending.append(CacheCleared(self._number()))

    def _makes_room(self) -> bool:
        """Whether an event is to be kept: a snapshot that is due tells it anyhow."""
        if len(self._pending) >= self._max_pending:
            self._collapse()
        return self.is_recording and not self._needs_snapshot

    def _collapse(self) -> None:
        self._next_number -= len(self._pending)
        self._pending = []
        self._needs_snapshot = True

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1
