"""Causes that repeat fill no log."""

import asyncio
import errno
import logging

import pytest

from rpc.log_stream import MAX_REPEATS, WINDOW_S, RepeatLimit
from tests.support.clock import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def limit(clock):
    return RepeatLimit(clock)


def record(text="store down", *args, level=logging.WARNING, name="baton.test", line=1, error=None):
    exc_info = (type(error), error, None) if error else None
    return logging.LogRecord(name, level, "test.py", line, text, args, exc_info)


def texts(limit, *records):
    return [admitted.getMessage() for each in records for admitted in limit.admit(each)]


def test_a_cause_that_repeats_is_left_out_and_counted(limit, clock):
    written = texts(limit, *(record("store %s down", n) for n in range(10_000)))
    assert written == [
        *(f"store {n} down" for n in range(MAX_REPEATS)),
        f"leaving out more messages for up to {WINDOW_S:.0f} s: baton.test store %s down",
    ]
    clock.now += WINDOW_S
    assert texts(limit, record("all is well", level=logging.INFO)) == [
        f"left out {10_000 - MAX_REPEATS} messages: baton.test store %s down",
        "all is well",
    ]
    assert texts(limit, record("store %s down", 1)) == ["store 1 down"]


def test_lines_per_minute_are_bounded_however_long_a_cause_lasts(limit, clock):
    written = []
    for _ in range(6000):
        written += texts(limit, record())
        clock.now += 0.1
    assert len(written) <= 600 / WINDOW_S * (MAX_REPEATS + 2)


def test_other_causes_are_written(limit):
    texts(limit, *[record()] * 1000)
    others = [
        record("another text"),
        record(name="baton.other"),
        record(line=2),
        record(level=logging.ERROR),
        record(error=OSError()),
    ]
    assert len(texts(limit, *others)) == len(others)


def test_numbers_in_a_text_make_no_other_cause(limit):
    lines = [record(f"accept failed\nsocket: <fd={n}, 0x{n:x}ff>") for n in range(1000)]
    lines += [record(f"fd {n} at 0x{n:x}ab is bad") for n in range(1000)]
    assert len(texts(limit, *lines)) == 2 * (MAX_REPEATS + 1)


def test_messages_below_warnings_always_pass(limit):
    lines = [record(level=logging.INFO)] * 1000
    assert len(texts(limit, *lines)) == 1000


def test_many_causes_take_bounded_memory_and_lines(limit):
    lines = [record("x" * n, line=n) for n in range(10_000)]
    assert len(texts(limit, *lines)) < 300
    assert len(limit._windows) < 300


def test_what_was_left_out_last_is_logged_at_the_end(limit):
    texts(limit, *[record()] * (MAX_REPEATS + 5))
    ends = [each.getMessage() for each in limit.end()]
    assert ends == ["left out 5 messages: baton.test store down"]
    assert not list(limit.end())


async def test_failures_of_the_event_loop_are_limited(limit, monkeypatch, caplog):
    """asyncio reports each connection that it cannot accept, a thousand times a second."""
    loop = asyncio.get_running_loop()
    for number in range(1000):
        error = OSError(errno.EMFILE, "Too many open files")
        context = {"message": "socket.accept() out of system resource", "exception": error}
        loop.default_exception_handler({**context, "socket": f"<socket fd={number}>"})
    assert len(caplog.records) == 1000
    assert len(texts(limit, *caplog.records)) == MAX_REPEATS + 1
