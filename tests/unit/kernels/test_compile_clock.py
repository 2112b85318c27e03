"""How long kernels were compiled: one after the other, side by side, failed, for ever."""

from itertools import count

import pytest
from triton import knobs

from kernels.triton.compile_clock import CompileClock, compile_clock


class Time:
    """A clock whose calls come from one thread after the other, unless a test sets `thread`."""

    def __init__(self):
        self.now = 50.0
        self.thread = None
        threads = count()
        self.clock = CompileClock(
            lambda: self.now, lambda: next(threads) if self.thread is None else self.thread
        )

    def after(self, seconds):
        self.now += seconds
        return self.clock


@pytest.fixture
def time():
    return Time()


def test_compilations_are_summed_up_while_they_run_and_afterwards(time):
    time.clock.begin("a")
    assert time.after(2.0).read_s() == 2.0
    time.after(1.0).end("a")
    assert time.after(100.0).read_s() == 3.0
    time.clock.begin("b")
    time.after(4.0).end("b")
    assert time.clock.read_s() == 7.0


def test_compilations_side_by_side_count_once(time):
    time.clock.begin("a")
    time.after(1.0).begin("b")
    time.after(1.0).end("a")
    assert time.after(1.0).read_s() == 3.0
    time.clock.end("b")
    assert time.after(9.0).read_s() == 3.0


def test_one_that_never_ends_counts_for_two_minutes(time):
    time.clock.begin("fails")
    assert time.after(1000.0).read_s() == 120.0
    time.clock.begin("next")
    assert time.after(5.0).read_s() == 125.0
    time.clock.end("next")
    assert time.after(1000.0).read_s() == 125.0


def test_one_that_fails_counts_until_its_thread_goes_on(time):
    time.thread = 1
    time.clock.begin("fails")
    time.thread = 2
    assert time.after(1.0).read_s() == 1.0, "it may still be compiled"
    time.thread = 1
    assert time.after(1.0).read_s() == 2.0
    assert time.after(10.0).read_s() == 2.0
    time.clock.begin("fails")
    time.after(1.0).begin("next")  # the retry has failed, too
    time.after(1.0).end("next")
    assert time.after(10.0).read_s() == 4.0


def test_one_that_fails_beside_another_ends_alone(time):
    time.thread = 1
    time.clock.begin("fails")
    time.thread = 2
    time.after(1.0).begin("long")
    time.thread = 1
    assert time.after(1.0).read_s() == 2.0
    assert time.after(1.0).read_s() == 3.0, "the other one is still compiled"
    time.thread = 2
    time.after(1.0).end("long")
    assert time.after(10.0).read_s() == 4.0


def test_an_unknown_kernel_ends_nothing(time):
    time.clock.end("a")
    time.clock.begin("a")
    time.after(2.0).end("b")
    assert time.after(1.0).read_s() == 3.0


def test_tritons_hooks_set_the_clock_and_call_those_before_them(monkeypatch):
    called = []
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        hook = lambda *, key, name=name, **facts: called.append((name, key, facts))  # noqa: E731
        monkeypatch.setattr(knobs.runtime, name, hook)
    compile_clock.cache_clear()
    try:
        clock = compile_clock()
        assert compile_clock() is clock
        before = clock.read_s()
        knobs.runtime.jit_cache_hook(key="k", fn=None)
        assert clock.read_s() >= before
        knobs.runtime.jit_post_compile_hook(key="k", fn=None)
        total_s = clock.read_s()
        assert clock.read_s() == total_s  # it stands still
    finally:
        compile_clock.cache_clear()
    facts = {"fn": None}
    assert called == [("jit_cache_hook", "k", facts), ("jit_post_compile_hook", "k", facts)]
