"""`Turns` between real processes: order, and processes that die or are stopped."""

import errno
import itertools
import logging
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import psutil
import pytest

from baton.common.errors import ConfigurationError
from engine.runner import TurnWish
from engine.runtime import turns as turns_module
from engine.runtime.turns import Turns
from tests.support.turn_taker import is_held, wait_until

BOUND_S = 0.05
SHORT, LONG = TurnWish(0.05, 0.001, 0.2), TurnWish(2.0, 0.0, 2.0)


class TurnTaker:
    """A process of `tests.support.turn_taker`, which takes turns on command."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.turn_taker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, command):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def read_reply(self):
        return self.process.stdout.readline().strip()

    def request(self, command):
        self.send(command)
        return self.read_reply()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path):
    """Starts processes that share `tmp_path`."""
    with ExitStack() as started:

        def start():
            taker = TurnTaker(tmp_path)
            started.callback(taker.close)
            return taker

        yield start


@pytest.fixture
def make(tmp_path):
    """Makes `Turns` in this process."""
    with ExitStack() as made:

        def make(**arguments):
            turns = Turns(str(tmp_path), **arguments)
            made.callback(turns.close)
            return turns

        yield make


@pytest.fixture
def sleeps(monkeypatch):
    """Records the sleeps of this process's `Turns`; they still happen."""
    taken, sleep = [], turns_module.time.sleep

    def note(seconds):
        taken.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(turns_module.time, "sleep", note)
    return taken


def test_two_engines_that_always_want_a_turn_alternate(start, tmp_path):
    order, count = tmp_path / "order", 50
    takers = [start(), start()]
    for taker in takers:
        taker.send(f"steps {count} {order}")
    assert [taker.read_reply() for taker in takers] == ["done", "done"]
    pids = order.read_text().split()
    assert len(pids) == 2 * count
    assert all(one != other for one, other in itertools.pairwise(pids))


def test_turns_never_overlap(make):
    """Threads, each with its own `Turns`, record every turn that is held during one of theirs."""
    count, held, overlaps = 100, [], []

    def compute(turns):
        for _ in range(count):
            with turns.wait_for_turn():
                overlaps.extend(held)
                held.append(turns)
                os.sched_yield()
                held.pop()

    threads = [threading.Thread(target=compute, args=(make(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []


def test_the_wish_of_an_engine_reaches_others_for_a_moment(make, monkeypatch):
    waiting, other = make(), make()
    now = 1000.0
    monkeypatch.setattr(turns_module.time, "monotonic", lambda: now)
    for wish, good_s in ((SHORT, 1.0), (LONG, 8.0)):
        waiting.wish = wish
        with waiting.wait_for_turn():
            assert other.others_wish == wish
        assert waiting.others_wish is None, "its own"
        waiting.wish = None
        with waiting.wait_for_turn():
            assert other.others_wish == wish, "it is not withdrawn"
        now += 0.99 * good_s
        assert other.others_wish == wish
        now += 0.02 * good_s
        assert other.others_wish is None
    now -= 500.0  # the machine was started again
    assert other.others_wish is None


def test_the_next_engine_finds_the_wish_of_the_turn_before(make):
    """An engine schedules in its turn: only then it knows how many sequences decode."""
    computing, following = make(), make()
    with computing.wait_for_turn():
        computing.wish = SHORT
        assert following.others_wish is None
    assert following.take()
    assert following.others_wish == SHORT


def test_after_a_handover_the_last_wish_counts_for_a_moment_however_old(make, monkeypatch):
    """The other engine will decode, but has not scheduled it yet."""
    streams, prompts = make(), make()
    now = 1000.0
    monkeypatch.setattr(turns_module.time, "monotonic", lambda: now)
    prompts.handed_over()
    assert prompts.others_wish is None, "nobody has wished for anything yet"
    streams.wish = SHORT
    streams.take()
    streams.end()
    now += 500.0
    assert prompts.others_wish is None
    prompts.handed_over()
    assert prompts.others_wish == SHORT
    assert streams.others_wish is None, "its own"
    now += 1.01
    assert prompts.others_wish is None
    prompts.handed_over()
    now -= 900.0  # the machine was started again
    assert prompts.others_wish is None


def test_an_old_wish_keeps_no_engine_that_hands_over_from_its_own(make, monkeypatch):
    """Both its streams and its prompts share the machine with others."""
    gone, both, other = make(), make(), make()
    now = 1000.0
    monkeypatch.setattr(turns_module.time, "monotonic", lambda: now)
    gone.wish, both.wish = SHORT, LONG
    with gone.wait_for_turn():
        pass
    now += 500.0
    both.handed_over()
    assert both.others_wish == SHORT
    with both.wait_for_turn():
        assert other.others_wish == LONG


def test_a_wish_outlives_a_long_turn(make, monkeypatch):
    """It is written again while its engine waits."""
    waiting, computing = make(), make()
    waiting.wish = SHORT
    now = 1000.0
    monkeypatch.setattr(turns_module.time, "monotonic", lambda: now)
    naps = 0

    def nap(seconds):
        nonlocal now, naps
        now, naps = now + 0.3, naps + 1
        assert computing.others_wish == SHORT
        if naps == 10:
            held.close()

    monkeypatch.setattr(turns_module.time, "sleep", nap)
    with ExitStack() as held:
        held.enter_context(computing.wait_for_turn())
        with waiting.wait_for_turn():
            assert naps == 10


def test_the_shortest_of_several_wishes_counts(make):
    first, second, other = make(), make(), make()
    for turns, wish in ((first, SHORT), (second, LONG), (first, SHORT)):
        turns.wish = wish
        with turns.wait_for_turn():
            assert other.others_wish == SHORT
    first.wish = TurnWish(0.02, 0.0, 0.02)
    with first.wait_for_turn():
        assert second.others_wish == first.wish


def test_a_wish_that_is_no_time_is_ignored(make, tmp_path):
    turns = make()
    for bad in (math.nan, math.inf, -1.0, 1e308):
        for wish in (TurnWish(bad, 0.0, 1.0), TurnWish(0.1, bad, 1.0), TurnWish(0.0, 0.0, 1.0)):
            fields = wish.turn_s, time.monotonic() + 0.5, wish.sequence_s, wish.max_s
            (tmp_path / "turn").write_bytes(bytes(8) + struct.pack("dddd", *fields))
            assert turns.others_wish is None
        assert 0.1 <= TurnWish(0.1, 0.1, bad).limit_s(3) <= 0.4, "its longest turn bounds nothing"


def test_files_of_an_older_version_have_no_wish(make, tmp_path):
    (tmp_path / "turn").write_bytes(b"stamp of")
    older = make()
    assert (tmp_path / "turn").stat().st_size == 40
    assert older.others_wish is None
    os.truncate(tmp_path / "turn", 8)
    assert older.others_wish is None


def test_a_turn_is_taken_before_the_step_that_computes_in_it(make, tmp_path):
    turns = make()
    assert turns.take()
    assert is_held(tmp_path / "turn")
    with turns.wait_for_turn():
        assert is_held(tmp_path / "turn")
    assert not is_held(tmp_path / "turn")

    assert turns.take()
    turns.end()  # there was nothing to compute
    turns.end()
    assert not is_held(tmp_path / "turn")


def test_a_wait_for_a_turn_ends_when_the_engine_is_woken(make, tmp_path):
    turns, other, woken = make(), make(), threading.Event()
    with other.wait_for_turn():
        assert not turns.take(), "it does not wait"
        waiting = threading.Thread(target=turns.take, args=(woken,))
        waiting.start()
        wait_until(lambda: is_held(tmp_path / "next"))
        woken.set()
        waiting.join()
        assert turns.waited_s > 0
        assert not is_held(tmp_path / "next"), "others may be next meanwhile"
    assert turns.take(woken), "nobody is in the way"
    assert is_held(tmp_path / "turn")


def test_a_wait_for_a_turn_ends_after_its_time(make, tmp_path):
    turns, other = make(), make()
    with other.wait_for_turn():
        assert not turns.take(threading.Event(), 0.01)
        assert not is_held(tmp_path / "next")
    assert turns.take(threading.Event(), 0.0), "nobody is in the way"


def test_a_turn_that_fails_ends(make, tmp_path):
    turns = make()

    def fail():
        with turns.wait_for_turn():
            assert is_held(tmp_path / "turn")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not is_held(tmp_path / "turn")


def test_one_thread_may_step_two_engines(make, sleeps):
    first, second = make(), make()
    for turns in (first, second, first, first, second):
        with turns.wait_for_turn():
            pass
    assert sleeps == []  # neither engine had to wait


def test_the_turn_of_a_killed_engine_passes_to_the_next(start, tmp_path):
    holder, waiter = start(), start()
    assert holder.request("take") == "taken"
    waiter.send("take")
    wait_until(lambda: is_held(tmp_path / "next"))
    holder.kill()
    assert waiter.read_reply() == "taken"
    assert is_held(tmp_path / "turn")


def test_a_killed_engine_that_was_next_does_not_block_the_others(start, make, tmp_path):
    waiter, turns = start(), make()
    with turns.wait_for_turn():
        waiter.send("take")
        wait_until(lambda: is_held(tmp_path / "next"))
        waiter.kill()
    with turns.wait_for_turn():
        assert is_held(tmp_path / "turn")


def test_a_forked_child_does_not_keep_the_turn(start, tmp_path):
    holder = start()
    assert holder.request("take") == "taken"
    child = psutil.Process(int(holder.request("fork")))
    holder.kill()
    wait_until(lambda: not is_held(tmp_path / "turn"))
    assert child.status() != psutil.STATUS_ZOMBIE


def test_a_stopped_engine_delays_the_others_once(start, make, sleeps, caplog):
    stopped, turns = start(), make(longest_turn_s=BOUND_S)
    assert stopped.request("take") == "taken"
    stopped.process.send_signal(signal.SIGSTOP)
    waited = count_sleeps_of_steps(turns, sleeps, 5)
    assert waited[0] > 0
    assert waited[1:] == [0, 0, 0, 0]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "computing, or next in turn, for 0.05 s" in record.message


def test_a_folder_whose_files_cannot_be_locked_is_refused(make, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    turns = make()
    monkeypatch.setattr(turns_module.fcntl, "flock", refuse)
    with pytest.raises(ConfigurationError, match="--turns-folder cannot be locked: No locks"):
        turns.wait_for_turn().__enter__()


def test_an_engine_stopped_while_next_delays_the_others_once(start, make, sleeps, caplog, tmp_path):
    stopped, turns = start(), make(longest_turn_s=BOUND_S)
    with turns.wait_for_turn():
        stopped.send("take")
        wait_until(lambda: is_held(tmp_path / "next"))
        stopped.process.send_signal(signal.SIGSTOP)
    waited = count_sleeps_of_steps(turns, sleeps, 3)
    assert waited[0] > 0
    assert waited[1:] == [0, 0]
    assert len(caplog.records) == 1


def test_a_stopped_engine_takes_turns_again_once_it_continues(
    start, make, sleeps, caplog, tmp_path
):
    stopped, turns = start(), make(longest_turn_s=BOUND_S)
    assert stopped.request("take") == "taken"
    stopped.process.send_signal(signal.SIGSTOP)
    count_sleeps_of_steps(turns, sleeps, 2)
    stopped.process.send_signal(signal.SIGCONT)
    assert stopped.request("give") == "given"
    with turns.wait_for_turn():
        assert is_held(tmp_path / "turn")
    assert len(caplog.records) == 1

    assert stopped.request("take") == "taken"
    waited = count_sleeps_of_steps(turns, sleeps, 2)
    assert waited[0] > 0
    assert waited[1] == 0
    assert len(caplog.records) == 2, "a second hang is reported again"


def test_an_engine_that_takes_another_turn_is_waited_for_again(start, make, sleeps, caplog):
    """A slow engine, unlike a stopped one, gets the full time limit in each turn."""
    slow, turns = start(), make(longest_turn_s=BOUND_S)
    for _ in range(3):
        assert slow.request("take") == "taken"
        waited = count_sleeps_of_steps(turns, sleeps, 2)
        assert waited[0] > 0
        assert waited[1] == 0
        assert slow.request("give") == "given"
    assert len(caplog.records) == 1


def count_sleeps_of_steps(turns, sleeps, num_steps):
    counts = []
    for _ in range(num_steps):
        sleeps.clear()
        with turns.wait_for_turn():
            counts.append(len(sleeps))
    return counts


def test_a_waiting_engine_polls_less_often_with_time(start, make, sleeps):
    holder, turns = start(), make(longest_turn_s=BOUND_S)
    assert holder.request("take") == "taken"
    with turns.wait_for_turn():
        pass
    assert sleeps == sorted(sleeps)
    assert sleeps[0] == 0.0002
    assert max(sleeps) <= 0.001


def test_without_a_folder_every_step_runs_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    turns = Turns(None)
    with turns.wait_for_turn(), turns.wait_for_turn():
        pass
    turns.close()
    assert list(tmp_path.iterdir()) == []


def test_kernels_that_are_compiled_are_waited_for_too():
    compiling_s = 3.0
    turns = Turns(None, read_compiling_s=lambda: compiling_s)
    assert turns.waited_s == 3.0
    with turns.wait_for_turn():
        compiling_s = 5.0
    assert turns.waited_s == 5.0


def test_waits_for_turns_do_not_count_compilations_twice(make):
    other, turns = make(), make(read_compiling_s=lambda: 1000.0)
    with other.wait_for_turn():
        pass
    for _ in range(2):
        with turns.wait_for_turn():
            pass
    assert 1000.0 <= turns.waited_s < 1900.0


def test_a_closed_engine_does_not_wait(make, tmp_path):
    turns = make()
    turns.close()
    turns.close()
    with turns.wait_for_turn():
        assert not is_held(tmp_path / "turn")


def test_an_absent_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"--turns-folder is .*/absent'.*No such file"):
        Turns(str(tmp_path / "absent"))


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "turn").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=r"--turns-folder is .*cannot create lock files"):
        Turns(str(tmp_path))
    assert not (tmp_path / "elsewhere").exists()
