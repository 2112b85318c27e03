"""`KvEventFeeds`: hands the prefix cache's events to those who follow them. Pure.

Each follower first gets what is cached, as `CacheCleared` and `BlocksStored`,
then every change. What waits for a follower is bounded: one that lags is given
the whole cache again, in place of what it missed. A new snapshot reaches all
followers; to those that did not need it, it says what they know.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from engine.kv_cache.events import CacheCleared, KvEvent

__all__ = ["KvEventFeeds"]


class KvEventFeeds:
    """The followers of one engine's prefix cache.

    Args:
        max_waiting: the most events and block keys that wait for one follower;
            more than a snapshot has.
        record: called with True to have a snapshot and then changes delivered,
            and with False when nobody follows any more.
    """

    def __init__(self, max_waiting: int, record: Callable[[bool], None]) -> None:
        self._max_waiting = max_waiting
        self._record = record
        self._feeds: set[_Feed] = set()

    async def follow(self) -> AsyncGenerator[Sequence[KvEvent], None]:
        """Yields events in their order, without end; to be closed by the caller."""
        feed = _Feed(self._max_waiting)
        self._feeds.add(feed)
        try:
            while True:
                if feed.take_fall():
                    self._record(True)
                if events := await feed.read():
                    yield events
        finally:
            self._feeds.discard(feed)
            if not self._feeds:
                self._record(False)

    def deliver(self, events: Sequence[KvEvent]) -> None:
        """Gives events to every follower."""
        for feed in self._feeds:
            feed.put(events)


class _Feed:
    """What waits for one follower. While it is behind, all before a snapshot is nothing to it."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._events: list[KvEvent] = []
        self._changed = asyncio.Event()
        self._is_behind = True
        self._has_fallen = True

    def take_fall(self) -> bool:
        """Whether it has fallen behind since this was asked last: a snapshot is due."""
        has_fallen, self._has_fallen = self._has_fallen, False
        return has_fallen

    def put(self, events: Sequence[KvEvent]) -> None:
        """Adds events; too many, and the feed is behind."""
        for event in events:
            if isinstance(event, CacheCleared):
                self._restart(is_behind=False)  # nothing before it counts any more
            if not self._is_behind:
                self._add(event)

    async def read(self) -> Sequence[KvEvent]:
        """All that waits; nothing if the feed has just fallen behind."""
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
        self._is_behind = self._has_fallen = is_behind


def _size_of(event: KvEvent) -> int:
    return 1 if isinstance(event, CacheCleared) else 1 + len(event.keys)
