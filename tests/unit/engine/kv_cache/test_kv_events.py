"""`KvEventLog`: a bounded log of KV events, numbered without gaps."""

from engine.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KvEventLog


def test_too_many_events_become_a_snapshot():
    cached: list[bytes] = []
    log = KvEventLog(lambda: tuple(cached), max_pending=3)
    assert log.start_recording() == (CacheCleared(1),)
    for index in range(5):
        cached.append(bytes([index]))
        log.record_stored(cached[-1:], None)
    cached.remove(b"\x01")
    log.record_removed([b"\x01"])

    assert log.take_events() == (
        CacheCleared(2),
        BlocksStored(3, (b"\0", b"\2", b"\3", b"\4"), None),
    )
    log.record_removed([b"\0"])
    assert log.take_events() == (BlocksRemoved(4, (b"\0",)),)


def test_events_within_the_limit_are_kept():
    log = KvEventLog(tuple, max_pending=3)
    log.start_recording()
    log.record_stored([b"a"], None)
    log.record_stored([b"b"], b"a")
    log.record_cleared()
    assert log.take_events() == (
        BlocksStored(2, (b"a",), None),
        BlocksStored(3, (b"b",), b"a"),
        CacheCleared(4),
    )


def test_sequence_numbers_continue_after_a_pause():
    log = KvEventLog(tuple)
    log.start_recording()
    log.record_cleared()
    log.stop_recording()
    log.record_cleared()
    assert log.take_events() == ()
    assert log.start_recording() == (CacheCleared(2),)
