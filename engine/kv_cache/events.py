"""`KvEventLog`: reports blocks that enter and leave the prefix cache to a router. Pure.

Events name layer group 0's block keys, which a router computes from a prompt's
tokens. If a block of the pool is sliced into several transfer blocks, its key is
that of the last one. A follower that misses a sequence number, or subscribes
late, needs a snapshot: call `start_recording` again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["BlocksRemoved", "BlocksStored", "CacheCleared", "KvEvent", "KvEventLog"]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that entered the prefix cache.

    Attributes:
        sequence_number: counts events, from 1.
        keys: keys of consecutive blocks of one sequence; unordered in a snapshot.
        parent: key of the block before them; None at the start of a sequence and
            in a snapshot.
    """

    sequence_number: int
    keys: tuple[bytes, ...]
    parent: bytes | None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that left the prefix cache."""

    sequence_number: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The prefix cache was emptied."""

    sequence_number: int


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


class KvEventLog:
    """A bounded log of events. It stays empty until `start_recording`.

    Args:
        cached_keys: returns every key in the prefix cache.
        max_pending: number of pending events beyond which a snapshot replaces them.

    Attributes:
        is_recording: whether events are kept.
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
        """Starts to record events.

        Returns:
            A snapshot: `CacheCleared`, then `BlocksStored` with every cached key.
        """
        self.is_recording = True
        self._collapse()
        return self.take_events()

    def stop_recording(self) -> None:
        """Drops pending events and stops recording."""
        self._collapse()
        self.is_recording = self._needs_snapshot = False

    def take_events(self) -> tuple[KvEvent, ...]:
        """Returns the events since the last call, numbered without a gap."""
        if self._needs_snapshot:
            self._needs_snapshot = False
            self._pending.append(CacheCleared(self._number()))
            self.record_stored(self._cached_keys(), None)
        events, self._pending = tuple(self._pending), []
        return events

    def record_stored(self, keys: Sequence[bytes], parent: bytes | None) -> None:
        """Records that blocks entered the cache; `parent` as in `BlocksStored`."""
        if self._keeps_events() and keys:
            self._pending.append(BlocksStored(self._number(), tuple(keys), parent))

    def record_removed(self, keys: Sequence[bytes]) -> None:
        """Records that blocks left the cache."""
        if self._keeps_events() and keys:
            self._pending.append(BlocksRemoved(self._number(), tuple(keys)))

    def record_cleared(self) -> None:
        """Records that all blocks left the cache."""
        if self._keeps_events():
            self._pending.append(CacheCleared(self._number()))

    def _keeps_events(self) -> bool:
        """Whether to append an event; not if the next events are a snapshot, which covers it."""
        if len(self._pending) >= self._max_pending:
            self._collapse()
        return self.is_recording and not self._needs_snapshot

    def _collapse(self) -> None:
        """Replaces the pending events by a snapshot, made when events are taken next."""
        self._next_number -= len(self._pending)
        self._pending = []
        self._needs_snapshot = True

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1
