"""`KvEventLog` and `KvEventFeeds`: blocks that enter and leave the prefix cache, for routers. Pure.

Events name layer group 0's block keys, which a router computes from a prompt's
tokens. If a block of the pool is sliced into several transfer blocks, its key is
that of the last one. A follower that misses a sequence number, or subscribes
late, needs a snapshot: call `start_recording` again.

Each follower first gets a snapshot of the cache, as `CacheCleared` and `BlocksStored`, then every
change. The queue of a follower is bounded: if a follower lags, a new snapshot replaces what it
missed. All followers receive the snapshot; for the others it changes nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

__all__ = ["BlocksRemoved", "BlocksStored", "CacheCleared", "KvEvent", "KvEventFeeds", "KvEventLog"]


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


class KvEventFeeds:
    """The followers of one engine's prefix cache.

    Args:
        max_waiting: the most events and block keys that wait for one follower. It must exceed
            the size of a snapshot.
        record: called with True to request a snapshot followed by changes, and with False when
            the last follower has left.
    """

    def __init__(self, max_waiting: int, record: Callable[[bool], None]) -> None:
        self._max_waiting = max_waiting
        self._record = record
        self._feeds: set[_Feed] = set()

    async def follow(self) -> AsyncGenerator[Sequence[KvEvent], None]:
        """Yields events in order, without end. The caller must close the generator."""
        feed = _Feed(self._max_waiting)
        self._feeds.add(feed)
        try:
            while True:
                if feed.take_needs_snapshot():
                    self._record(True)
                if events := await feed.read():
                    yield events
        finally:
            self._feeds.discard(feed)
            if not self._feeds:
                self._record(False)

    def deliver(self, events: Sequence[KvEvent]) -> None:
        """Adds events to the queue of every follower."""
        for feed in self._feeds:
            feed.put(events)


class _Feed:
    """The queue of one follower. While the follower lags, events before a snapshot are dropped."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._events: list[KvEvent] = []
        self._changed = asyncio.Event()
        self._is_behind = True
        self._needs_snapshot = True

    def take_needs_snapshot(self) -> bool:
        """Returns whether the follower has begun to lag since the last call."""
        needs_snapshot, self._needs_snapshot = self._needs_snapshot, False
        return needs_snapshot

    def put(self, events: Sequence[KvEvent]) -> None:
        """Adds events. If they are too many, the follower lags."""
        for event in events:
            if isinstance(event, CacheCleared):
                self._restart(is_behind=False)  # a snapshot starts; it replaces all before it
            if not self._is_behind:
                self._add(event)

    async def read(self) -> Sequence[KvEvent]:
        """Waits for events and returns all of them; none if the follower has just begun to lag."""
        await self._changed.wait()
        self._changed.clear()
        events, self._events, self._num_waiting = self._events, [], 0
        return events

    def _add(self, event: KvEvent) -> None:
        self._events.append(event)
        self._num_waiting += _size_of(event)
        if self._num_waiting > self._max_waiting:
            self._restart(is_behind=True)
        self._changed.set()

    def _restart(self, *, is_behind: bool) -> None:
        self._events.clear()
        self._num_waiting = 0
        self._is_behind = self._needs_snapshot = is_behind


def _size_of(event: KvEvent) -> int:
    return 1 if isinstance(event, CacheCleared) else 1 + len(event.keys)
