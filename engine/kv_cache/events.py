"""`KvEventLog` and `KvEventFeeds`: blocks that enter and leave the prefix cache, for routers. Pure.

Blocks that enter the stores are named, too, as other engines can load them from there.

Events name the blocks of every layer group by the keys that a router computes from a prompt's
tokens. If a block of the pool is sliced into several transfer blocks, its key is that of the last
one. A follower that misses a sequence number, or subscribes late, needs a snapshot: call
`start_recording` again.

Each follower first gets a snapshot of the cache, as `CacheCleared` and `BlocksStored`, then every
change. The queue of a follower is bounded: if a follower lags, a new snapshot replaces what it
missed.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "BlocksMissing",
    "BlocksRemoved",
    "BlocksSaved",
    "BlocksStored",
    "CacheCleared",
    "CachedRun",
    "KvEvent",
    "KvEventFeeds",
    "KvEventLog",
]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that entered the prefix cache.

    Attributes:
        sequence_number: counts changes, from 1. The parts of a snapshot have the number of the last
            change before it.
        keys: keys of consecutive blocks of one sequence.
        parent: key of the block before them; None at the start of a sequence.
        layer_group: number of their layer group.
    """

    sequence_number: int
    keys: tuple[bytes, ...]
    parent: bytes | None
    layer_group: int = 0


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks of one layer group that left the prefix cache."""

    sequence_number: int
    keys: tuple[bytes, ...]
    layer_group: int = 0


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The prefix cache was emptied."""

    sequence_number: int


@dataclass(frozen=True, slots=True)
class BlocksSaved:
    """Blocks that entered the connector's stores, where other engines find them.

    Attributes:
        sequence_number: see `BlocksStored`.
        keys: keys of transfer blocks.
        ttl_s: how long they stay there at least without being read; 0.0 if that is not known.
    """

    sequence_number: int
    keys: tuple[bytes, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class BlocksMissing:
    """Transfer blocks that were looked for in the connector's stores in vain."""

    sequence_number: int
    keys: tuple[bytes, ...]


KvEvent = BlocksStored | BlocksRemoved | CacheCleared | BlocksSaved | BlocksMissing

CachedRun = tuple[int, tuple[bytes, ...], bytes | None]
"""A layer group, keys of consecutive cached blocks, and the key of the block before them."""


class KvEventLog:
    """A bounded log of events. It stays empty until `start_recording`.

    Args:
        cached_runs: returns all blocks in the prefix cache.
        max_pending: number of pending events beyond which a snapshot replaces them.

    Attributes:
        is_recording: whether events are kept.
    """

    def __init__(
        self, cached_runs: Callable[[], Iterable[CachedRun]], *, max_pending: int = 4096
    ) -> None:
        self.is_recording = False
        self._cached_runs = cached_runs
        self._max_pending = max_pending
        self._pending: list[KvEvent] = []
        self._next_number = 1
        self._needs_snapshot = False

    @property
    def newest(self) -> int:
        """Number of the last event that was taken; 0 before the first."""
        return self._next_number - 1 - len(self._pending)

    def start_recording(self) -> tuple[tuple[KvEvent, ...], tuple[KvEvent, ...]]:
        """Starts to record events, if that has not been started.

        Returns:
            The events since the last call of `take_events`, and a snapshot for those who do not
            know what was before them.
        """
        events = self.take_events()
        self.is_recording = True
        return events, self._snapshot(self.newest)

    def stop_recording(self) -> None:
        """Drops pending events and stops recording."""
        self._collapse()
        self.is_recording = self._needs_snapshot = False

    def take_events(self) -> tuple[KvEvent, ...]:
        """Returns the events since the last call, numbered without a gap."""
        if self._needs_snapshot:
            self._needs_snapshot = False
            return self._snapshot(self._number())
        events, self._pending = tuple(self._pending), []
        return events

    def record_stored(
        self, keys: Sequence[bytes], parent: bytes | None, layer_group: int = 0
    ) -> None:
        """Records that blocks entered the cache; the arguments are those of `BlocksStored`."""
        if self._keeps_events() and keys:
            self._pending.append(BlocksStored(self._number(), tuple(keys), parent, layer_group))

    def record_removed(self, keys: Sequence[bytes], layer_group: int = 0) -> None:
        """Records that blocks left the cache."""
        if self._keeps_events() and keys:
            self._pending.append(BlocksRemoved(self._number(), tuple(keys), layer_group))

    def record_saved(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """Records that blocks entered the stores; the arguments are those of `BlocksSaved`."""
        if self._keeps_events() and keys:
            self._pending.append(BlocksSaved(self._number(), tuple(keys), ttl_s))

    def record_missing(self, key: bytes) -> None:
        """Records that a block was not in the stores."""
        if self._keeps_events():
            self._pending.append(BlocksMissing(self._number(), (key,)))

    def record_cleared(self) -> None:
        """Records that all blocks left the cache."""
        if self._keeps_events():
            self._pending.append(CacheCleared(self._number()))

    def _keeps_events(self) -> bool:
        """Whether to append an event; not if the next events are a snapshot, which covers it."""
        if len(self._pending) >= self._max_pending:
            self._collapse()
        return self.is_recording and not self._needs_snapshot

    def _snapshot(self, number: int) -> tuple[KvEvent, ...]:
        stored = (BlocksStored(number, keys, parent, g) for g, keys, parent in self._cached_runs())
        return (CacheCleared(number), *stored)

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

    def deliver_snapshot(self, recorded: tuple[Sequence[KvEvent], Sequence[KvEvent]]) -> None:
        """Adds what `KvEventLog.start_recording` has returned: the events to the queue of every
        follower, and the snapshot to those that need one.
        """
        events, snapshot = recorded
        self.deliver(events)
        for feed in self._feeds:
            if feed.is_behind:
                feed.put(snapshot)


class _Feed:
    """The queue of one follower. While the follower lags, events before a snapshot are dropped.

    Attributes:
        is_behind: whether the follower lags.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._events: list[KvEvent] = []
        self._changed = asyncio.Event()
        self.is_behind = True
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
            if not self.is_behind:
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
        self.is_behind = self._needs_snapshot = is_behind


def _size_of(event: KvEvent) -> int:
    return 1 if isinstance(event, CacheCleared) else 1 + len(event.keys)
