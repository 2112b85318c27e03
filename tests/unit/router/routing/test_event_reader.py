"""`KvEventReader`: gaps, repetitions and snapshots of one replica's events, and how far behind."""

import pytest

from engine.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared
from engine.wire import kv_event_responses
from router.routing.cache_form import CacheForm
from router.routing.cache_index import CacheIndex
from router.routing.event_reader import KvEventReader
from router.routing.replica_cache import KvEventError

KEYS = tuple(bytes([i]) for i in range(8))


@pytest.fixture
def index():
    return CacheIndex()


@pytest.fixture
def reader(index):
    cache = index.join("a", CacheForm(tokens_per_block=4, max_blocks=(6,)))
    return KvEventReader(cache, index.stored, lambda: ["s"])


def take(reader, *events):
    for response in kv_event_responses(events):
        reader.take(response.events)


def blocks(index):
    return index.match(KEYS, 1000).blocks("a")


def test_a_stream_is_a_snapshot_and_changes(index, reader):
    assert not reader.has_begun
    take(
        reader,
        CacheCleared(3),
        BlocksStored(3, KEYS[:2], None),
        BlocksStored(3, KEYS[2:3], KEYS[1]),
    )
    assert reader.has_begun
    assert blocks(index) == 3
    take(reader, BlocksStored(4, KEYS[3:5], KEYS[2]), BlocksRemoved(5, KEYS[4:5]))
    assert blocks(index) == 4
    take(reader, CacheCleared(6))
    assert blocks(index) == 0


def test_repeated_and_late_events_change_nothing(index, reader):
    events = [
        CacheCleared(0),
        BlocksStored(1, KEYS[:4], None),
        BlocksRemoved(2, KEYS[3:4]),
        BlocksStored(3, KEYS[3:5], KEYS[2]),
    ]
    take(reader, *events)
    take(reader, *events[1:])
    take(reader, CacheCleared(2), events[2])
    assert blocks(index) == 5


def test_a_gap_makes_the_content_unknown(index, reader):
    take(reader, CacheCleared(0), BlocksStored(1, KEYS[:4], None))
    with pytest.raises(KvEventError, match="event 3 follows event 1"):
        take(reader, BlocksStored(3, KEYS[4:5], KEYS[3]))
    assert blocks(index) == 0
    with pytest.raises(KvEventError, match="snapshot"):
        take(reader, BlocksStored(4, KEYS[4:5], KEYS[3]))
    take(reader, CacheCleared(4), BlocksStored(4, KEYS[:5], None))
    assert blocks(index) == 5


def test_a_gap_before_a_snapshot_is_none(index, reader):
    take(reader, CacheCleared(0), BlocksStored(1, KEYS[:4], None))
    take(reader, CacheCleared(9), BlocksStored(9, KEYS[:2], None))
    assert blocks(index) == 2


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (BlocksStored(1, KEYS, None), "more than 6"),
        (BlocksStored(1, KEYS[:1], None, 1), "no layer group 1"),
        (BlocksRemoved(1, KEYS[:1], 7), "no layer group 7"),
    ],
)
def test_impossible_events_are_refused(index, reader, event, message):
    take(reader, CacheCleared(0))
    with pytest.raises(KvEventError, match=message):
        take(reader, event)
    assert len(index) == 0


def test_staleness_counts_from_the_report_of_a_missing_event(reader):
    take(reader, CacheCleared(5))
    reader.report(5, 10.0)
    assert reader.staleness_s(11.0) == 0.0
    reader.report(6, 12.0)
    reader.report(8, 14.0)
    assert reader.staleness_s(15.0) == 3.0
    take(reader, BlocksStored(6, KEYS[:1], None))
    assert reader.staleness_s(15.0) == 0.0
    reader.report(8, 16.0)
    assert reader.staleness_s(17.0) == 1.0
    reader.end()
    assert reader.staleness_s(18.0) == 0.0
