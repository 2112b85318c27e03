"""`KvEventFeeds`: delivers events of the prefix cache to its followers. Pure.

Each follower first gets a snapshot of the cache, as `CacheCleared` and `BlocksStored`, then every
change. The queue of a follower is bounded: if a follower lags, a new snapshot replaces what it
missed. All followers receive the snapshot; for the others it changes nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from engine.kv_cache.events import CacheCleared, KvEvent

__all__ = ["KvEventFeeds"]


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
