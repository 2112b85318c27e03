"""What a silent peer may still write to: how long it is not used, and how it is used then."""

import threading
import time

import numpy as np
import pytest
import torch

from kvstore.codec import HEADER_BYTES
from kvstore.layout import KvLayout
from kvstore.mover import staging
from kvstore.mover.staging import StagingBuffers
from kvstore.peer import settlements
from kvstore.peer.settlements import Settlements
from kvstore.quarantine import QUARANTINE_S, Quarantine

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, block_size=4, head_dim=5, dtype="float32")
TIMEOUT_S = 10.0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def buffers(clock, monkeypatch):
    """Two segments."""
    monkeypatch.setattr(staging, "_NUM_SEGMENTS", 2)
    return StagingBuffers(LAYOUT, torch.device("cpu"), clock)


def never():
    return False


def lose_all(buffers, has_settled=never):
    taken = [buffers.take(), buffers.take()]
    for segment in taken:
        buffers.quarantine(segment, has_settled)
    return taken


def test_what_settles_is_safe_and_what_does_not_is_doubtful(clock):
    quarantine, settled = Quarantine(clock), set()
    for name in ("a", "b"):
        quarantine.add(name, lambda name=name: name in settled)
    clock.now += QUARANTINE_S - 1
    quarantine.add("c", never)
    assert quarantine.take_over() == ([], [])
    settled.add("b")
    assert quarantine.take_over() == (["b"], [])
    clock.now += 1
    assert quarantine.take_over() == ([], ["a"])
    clock.now += QUARANTINE_S - 2
    assert quarantine.take_over() == ([], [])
    assert len(quarantine) == 1
    settled.add("c")
    clock.now += 1
    assert quarantine.take_over() == ([], ["c"]), "each asks for itself"


def test_what_settles_in_the_last_moment_is_safe(clock):
    quarantine = Quarantine(clock)
    quarantine.add("late", lambda: True)
    clock.now += 2 * QUARANTINE_S
    assert quarantine.take_over() == (["late"], [])


def test_a_segment_that_settles_is_trusted_again(buffers):
    settled = threading.Event()
    segments = lose_all(buffers, settled.is_set)
    assert buffers.take() is None
    assert (buffers.is_lost, buffers.num_quarantined) == (True, 2)
    settled.set()
    assert buffers.take() in segments
    assert (buffers.is_lost, buffers.num_quarantined, buffers.is_in_doubt) == (False, 0, False)
    assert all(segment.trusted is segment for segment in segments)


def test_segments_that_never_settle_are_used_again_by_way_of_private_memory(buffers, clock):
    lose_all(buffers)
    clock.now += QUARANTINE_S
    segments = [buffers.take(), buffers.take()]
    assert None not in segments
    assert buffers.take() is None
    assert buffers.is_in_doubt
    for segment in segments:
        known = segment.frames
        private = segment.trusted.frames
        assert segment.trusted.frames is private, "one for each"
        assert not np.shares_memory(known.numpy(), private.numpy())
        assert known.shape == private.shape
        known[:] = 7
        segment.secure(1)
        assert (private[0] == 7).all()
        assert not private[1:].any(), "no more than what was fetched"
    assert segments[0].trusted is not segments[1].trusted


def test_a_trusted_segment_is_not_copied(buffers):
    segment = buffers.take()
    segment.frames[:] = 3
    segment.secure(segment.num_slots)
    assert segment.trusted is segment
    assert bytes(segment.slots[0].header) == bytes([3]) * HEADER_BYTES


def test_trusted_segments_are_taken_first(buffers, clock):
    first, second = buffers.take(), buffers.take()
    buffers.quarantine(second, never)
    clock.now += QUARANTINE_S
    buffers.end_quarantines()
    buffers.give_back(first)
    for _ in range(2):
        taken = [buffers.take(), buffers.take()]
        assert taken == [first, second]
        for segment in taken:
            buffers.give_back(segment)


def test_doubt_lasts(buffers, clock):
    """Once given up nobody asks any more, so nothing can end it."""
    lose_all(buffers)
    clock.now += QUARANTINE_S
    buffers.quarantine(buffers.take(), lambda: True)
    assert all(buffers.take().is_doubtful for _ in range(2))


def test_saves_go_on_while_all_segments_are_lost(buffers):
    settled = threading.Event()
    segments = lose_all(buffers, settled.is_set)
    spare = buffers.take_for_save()
    assert spare is not None
    assert spare not in segments
    assert buffers.take_for_save() is None, "one at a time"
    assert buffers.is_lost, "it is for no load"
    buffers.give_back(spare)
    assert buffers.take_for_save() is spare, "made once"
    settled.set()
    buffers.give_back(spare)
    assert {buffers.take_for_save(), buffers.take_for_save()} == set(segments)
    assert buffers.take_for_save() is None, "those in use come back"


def test_an_outage_of_loads_is_logged_once(buffers, clock, caplog):
    lose_all(buffers)
    for _ in range(5):
        assert buffers.take() is None
    assert caplog.text.count("loads fail for a while") == 1
    clock.now += QUARANTINE_S
    buffers.take()
    buffers.take()
    assert caplog.text.count("2 KV buffers are used again") == 1


@pytest.fixture
def opened(clock, monkeypatch):
    monkeypatch.setattr(settlements, "_PERIOD_S", 0.005)
    woken = threading.Event()
    asked = Settlements(woken.set, clock)
    asked.woken = woken
    yield asked
    asked.close()


def wait_until(is_so):
    until = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_what_settles_is_told(opened):
    settled = threading.Event()
    has_settled = opened.add(settled.is_set)
    assert not has_settled()
    settled.set()
    assert opened.woken.wait(TIMEOUT_S)
    assert has_settled()
    assert opened.num_open == 0


def test_what_never_settles_is_asked_for_a_bounded_time(opened, clock):
    questions = []
    has_settled = opened.add(lambda: bool(questions.append(clock.now)))
    wait_until(lambda: len(questions) > 2)
    assert opened.num_open == 1
    clock.now += QUARANTINE_S
    assert opened.woken.wait(TIMEOUT_S)
    assert opened.num_open == 0
    assert not has_settled()
    wait_until(lambda: opened._thread is None)
    opened.add(lambda: True)  # and the next is asked for all the same
    wait_until(lambda: opened.num_open == 0)


def test_questions_that_fail_are_logged_once(opened, caplog):
    questions = []

    def fail():
        questions.append(None)
        raise RuntimeError("no answer")

    opened.add(fail)
    wait_until(lambda: len(questions) > 5)
    assert caplog.text.count("is not known") == 1


def test_what_a_pool_waits_for_is_asked_for_ever(opened, clock):
    questions, settled = [], threading.Event()
    has_settled = opened.add(lambda: questions.append(1) or settled.is_set(), for_good=True)
    clock.now += 100 * QUARANTINE_S
    wait_until(lambda: len(questions) > 3)
    assert opened.num_open == 1
    settled.set()
    assert opened.woken.wait(TIMEOUT_S)
    assert has_settled()
