"""Followers of the prefix cache: snapshot first, every change, bounded."""

import asyncio
from contextlib import aclosing

import pytest

from engine.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared
from engine.kv_event_feed import KvEventFeeds
from engine.wire import kv_event_responses

pytestmark = pytest.mark.alone


class Recorder:
    """Notes what it is asked; the tests answer."""

    def __init__(self, max_waiting=100):
        self.asked = []
        self.feeds = KvEventFeeds(max_waiting, self.asked.append)


def stored(number, *keys, parent=None):
    return BlocksStored(number, keys, parent)


async def started(events):
    """A read that has begun to wait."""
    reading = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    return reading


async def test_a_follower_gets_a_snapshot_and_then_changes():
    recorder = Recorder()
    async with aclosing(recorder.feeds.follow()) as events:
        reading = await started(events)
        assert recorder.asked == [True]
        recorder.feeds.deliver([stored(4, b"a")])  # from before the snapshot
        recorder.feeds.deliver([CacheCleared(5), stored(6, b"a", b"b")])
        assert list(await reading) == [CacheCleared(5), stored(6, b"a", b"b")]
        recorder.feeds.deliver([stored(7, b"c")])
        recorder.feeds.deliver([BlocksRemoved(8, (b"a",))])
        assert list(await anext(events)) == [stored(7, b"c"), BlocksRemoved(8, (b"a",))]
        assert recorder.asked == [True]
    assert recorder.asked == [True, False]


async def test_recording_goes_on_while_anybody_follows():
    recorder = Recorder()
    async with aclosing(recorder.feeds.follow()) as first:
        reading = await started(first)
        async with aclosing(recorder.feeds.follow()) as second:
            other = await started(second)
            recorder.feeds.deliver([CacheCleared(1)])
            assert list(await reading) == list(await other) == [CacheCleared(1)]
        assert recorder.asked == [True, True]
    assert recorder.asked == [True, True, False]


async def test_a_follower_that_lags_gets_the_whole_again():
    recorder = Recorder(max_waiting=6)
    async with aclosing(recorder.feeds.follow()) as events:
        reading = await started(events)
        recorder.feeds.deliver([CacheCleared(1)])
        await reading
        for number in range(2, 9):
            recorder.feeds.deliver([stored(number, b"k")])
        assert recorder.asked == [True]  # nobody has read yet
        reading = await started(events)
        assert recorder.asked == [True, True]
        recorder.feeds.deliver([BlocksRemoved(9, (b"k",))])  # of no use without the rest
        recorder.feeds.deliver([CacheCleared(10), stored(11, b"l")])
        assert list(await reading) == [CacheCleared(10), stored(11, b"l")]
        assert recorder.asked == [True, True]


async def test_a_cleared_cache_is_a_snapshot_too():
    recorder = Recorder(max_waiting=6)
    async with aclosing(recorder.feeds.follow()) as events:
        reading = await started(events)
        recorder.feeds.deliver([CacheCleared(1)])
        await reading
        recorder.feeds.deliver([stored(2, b"a", b"b", b"c")])
        recorder.feeds.deliver([CacheCleared(3), stored(4, b"d", b"e", b"f")])
        assert list(await anext(events)) == [CacheCleared(3), stored(4, b"d", b"e", b"f")]
        assert recorder.asked == [True]


def test_events_are_told_in_their_order():
    events = [CacheCleared(1), stored(2, b"a"), stored(3, b"b", parent=b"a"), BlocksRemoved(4, ())]
    (response,) = kv_event_responses(events)
    told = response.events
    assert [event.sequence_number for event in told] == [1, 2, 3, 4]
    kinds = [event.WhichOneof("event") for event in told]
    assert kinds == ["cleared", "stored", "stored", "removed"]
    assert [event.stored.HasField("parent") for event in told[1:3]] == [False, True]
    assert told[2].stored.parent == b"a"
    assert list(kv_event_responses([])) == []


@pytest.mark.parametrize("parent", [None, b"p"])
def test_a_large_event_comes_in_several_messages(parent):
    keys = tuple(index.to_bytes(4, "big") for index in range(2**17 + 5))
    events = [stored(7, *keys, parent=parent), BlocksRemoved(8, keys)]
    responses = list(kv_event_responses(events))
    parts = [event for response in responses for event in response.events]
    assert [key for part in parts for key in part.stored.keys] == list(keys)
    assert [key for part in parts for key in part.removed.keys] == list(keys)
    assert (
        max(
            sum(len(event.stored.keys) + len(event.removed.keys) for event in response.events)
            for response in responses
        )
        <= 2**16
    )
    follows = [part.stored for part in parts if part.HasField("stored")]
    assert {part.sequence_number for part in parts} == {7, 8}
    if parent is None:  # a snapshot has no order
        assert not any(part.HasField("parent") for part in follows)
    else:
        assert [part.parent for part in follows] == [b"p", keys[2**16 - 1], keys[2**17 - 1]]
