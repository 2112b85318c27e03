"""`KvEventLog`: a bounded log without gaps. `KvEventFeeds`: snapshots, changes, bounds."""

import asyncio
from contextlib import aclosing

import pytest

from engine.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEventFeeds,
    KvEventLog,
)
from engine.wire import kv_event_responses


def test_too_many_events_become_a_snapshot():
    cached: list[bytes] = []
    log = KvEventLog(lambda: [(0, tuple(cached), None)] if cached else [], max_pending=3)
    assert log.start_recording() == ((), (CacheCleared(0),))
    for index in range(5):
        cached.append(bytes([index]))
        log.record_stored(cached[-1:], None)
    cached.remove(b"\x01")
    log.record_removed([b"\x01"])

    assert log.newest == 0
    assert log.take_events() == (
        CacheCleared(1),
        BlocksStored(1, (b"\0", b"\2", b"\3", b"\4"), None),
    )
    log.record_removed([b"\0"], 2)
    assert log.take_events() == (BlocksRemoved(2, (b"\0",), 2),)
    assert log.newest == 2


def test_events_within_the_limit_are_kept():
    log = KvEventLog(tuple, max_pending=3)
    log.start_recording()
    log.record_stored([b"a"], None)
    log.record_stored([b"b"], b"a")
    log.record_cleared()
    assert log.take_events() == (
        BlocksStored(1, (b"a",), None),
        BlocksStored(2, (b"b",), b"a"),
        CacheCleared(3),
    )


def test_a_snapshot_for_a_late_follower_loses_no_event_of_the_others():
    log = KvEventLog(lambda: [(0, (b"a",), None), (1, (b"b",), b"a")])
    log.start_recording()
    log.record_stored([b"a"], None)
    log.record_stored([b"b"], b"a", 1)
    events, snapshot = log.start_recording()
    assert events == (BlocksStored(1, (b"a",), None), BlocksStored(2, (b"b",), b"a", 1))
    assert snapshot == (
        CacheCleared(2),
        BlocksStored(2, (b"a",), None),
        BlocksStored(2, (b"b",), b"a", 1),
    )
    log.record_cleared()
    assert log.take_events() == (CacheCleared(3),)


def test_sequence_numbers_continue_after_a_pause():
    log = KvEventLog(tuple)
    log.start_recording()
    log.record_cleared()
    log.stop_recording()
    log.record_cleared()
    assert log.take_events() == ()
    log.start_recording()
    log.record_removed([b"a"])
    assert log.take_events() == (BlocksRemoved(1, (b"a",)),)


class FakeRecorder:
    """Records each request to start or stop recording; the tests deliver the events."""

    def __init__(self, max_waiting=100):
        self.requests = []
        self.feeds = KvEventFeeds(max_waiting, self.requests.append)


def stored_event(number, *keys, parent=None):
    return BlocksStored(number, keys, parent)


async def start_read(events):
    """Starts a read of the next events and lets it wait."""
    reading = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    return reading


async def test_a_follower_gets_a_snapshot_and_then_changes():
    recorder = FakeRecorder()
    async with aclosing(recorder.feeds.follow()) as events:
        reading = await start_read(events)
        assert recorder.requests == [True]
        recorder.feeds.deliver([stored_event(4, b"a")])  # recorded before the snapshot
        snapshot = [CacheCleared(5), stored_event(5, b"a", b"b")]
        recorder.feeds.deliver_snapshot(([stored_event(5, b"b")], snapshot))
        assert list(await reading) == snapshot
        recorder.feeds.deliver([stored_event(6, b"c")])
        recorder.feeds.deliver([BlocksRemoved(7, (b"a",))])
        assert list(await anext(events)) == [stored_event(6, b"c"), BlocksRemoved(7, (b"a",))]
        assert recorder.requests == [True]
    assert recorder.requests == [True, False]


async def test_a_snapshot_reaches_only_those_who_need_it():
    recorder = FakeRecorder()
    async with aclosing(recorder.feeds.follow()) as first:
        reading = await start_read(first)
        recorder.feeds.deliver_snapshot(([], [CacheCleared(1)]))
        await reading
        async with aclosing(recorder.feeds.follow()) as second:
            readings = [await start_read(first), await start_read(second)]
            snapshot = [CacheCleared(2), stored_event(2, b"a")]
            recorder.feeds.deliver_snapshot(([stored_event(2, b"a")], snapshot))
            assert list(await readings[0]) == [stored_event(2, b"a")]
            assert list(await readings[1]) == snapshot


async def test_recording_continues_until_the_last_follower_leaves():
    recorder = FakeRecorder()
    async with aclosing(recorder.feeds.follow()) as first:
        reading = await start_read(first)
        async with aclosing(recorder.feeds.follow()) as second:
            other = await start_read(second)
            recorder.feeds.deliver([CacheCleared(1)])
            assert list(await reading) == list(await other) == [CacheCleared(1)]
        assert recorder.requests == [True, True]
    assert recorder.requests == [True, True, False]


async def test_a_follower_that_lags_gets_a_new_snapshot():
    recorder = FakeRecorder(max_waiting=6)
    async with aclosing(recorder.feeds.follow()) as events:
        reading = await start_read(events)
        recorder.feeds.deliver([CacheCleared(1)])
        await reading
        for number in range(2, 9):
            recorder.feeds.deliver([stored_event(number, b"k")])
        assert recorder.requests == [True]  # the follower has not read yet
        reading = await start_read(events)
        assert recorder.requests == [True, True]
        recorder.feeds.deliver([BlocksRemoved(9, (b"k",))])  # useless without the dropped events
        recorder.feeds.deliver([CacheCleared(10), stored_event(11, b"l")])
        assert list(await reading) == [CacheCleared(10), stored_event(11, b"l")]
        assert recorder.requests == [True, True]


async def test_a_cleared_cache_is_a_snapshot_too():
    recorder = FakeRecorder(max_waiting=6)
    async with aclosing(recorder.feeds.follow()) as events:
        reading = await start_read(events)
        recorder.feeds.deliver([CacheCleared(1)])
        await reading
        recorder.feeds.deliver([stored_event(2, b"a", b"b", b"c")])
        recorder.feeds.deliver([CacheCleared(3), stored_event(4, b"d", b"e", b"f")])
        assert list(await anext(events)) == [CacheCleared(3), stored_event(4, b"d", b"e", b"f")]
        assert recorder.requests == [True]


def test_events_are_sent_in_order():
    events = [
        CacheCleared(1),
        stored_event(2, b"a"),
        stored_event(3, b"b", parent=b"a"),
        BlocksRemoved(4, ()),
    ]
    (response,) = kv_event_responses(events)
    sent = response.events
    assert [event.sequence_number for event in sent] == [1, 2, 3, 4]
    kinds = [event.WhichOneof("event") for event in sent]
    assert kinds == ["cleared", "stored", "stored", "removed"]
    assert [event.stored.HasField("parent") for event in sent[1:3]] == [False, True]
    assert sent[2].stored.parent == b"a"
    assert list(kv_event_responses([])) == []


@pytest.mark.parametrize("parent", [None, b"p"])
def test_a_large_event_comes_in_several_messages(parent):
    keys = tuple(index.to_bytes(4, "big") for index in range(2**13 + 5))
    events = [stored_event(7, *keys, parent=parent), BlocksRemoved(8, keys)]
    responses = list(kv_event_responses(events))
    parts = [event for response in responses for event in response.events]
    assert [key for part in parts for key in part.stored.keys] == list(keys)
    assert [key for part in parts for key in part.removed.keys] == list(keys)
    assert (
        max(
            sum(len(event.stored.keys) + len(event.removed.keys) for event in response.events)
            for response in responses
        )
        <= 2**12
    )
    follows = [part.stored for part in parts if part.HasField("stored")]
    assert {part.sequence_number for part in parts} == {7, 8}
    assert follows[0].HasField("parent") == (parent is not None)
    assert [part.parent for part in follows] == [parent or b"", keys[2**12 - 1], keys[2**13 - 1]]
