"""`Turns` between real processes: who is next, who dies, who is stopped."""

import errno
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import psutil
import pytest

from baton.errors import ConfigurationError
from engine.runtime import turns as turns_module
from engine.runtime.turns import Turns
from tests.support.turn_taker import is_held, wait_until

pytestmark = pytest.mark.alone

BOUND_S = 0.05


class TurnTaker:
    """A process that takes turns when told; see `tests.support.turn_taker`."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.turn_taker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def hear(self):
        return self.process.stdout.readline().strip()

    def ask(self, command):
        self.tell(command)
        return self.hear()

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
    """The pauses that `Turns` of this process make; they still happen."""
    taken, sleep = [], turns_module.time.sleep

    def note(seconds):
        taken.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(turns_module.time, "sleep", note)
    return taken


def test_two_that_always_want_a_turn_alternate(start, tmp_path):
    order, count = tmp_path / "order", 50
    takers = [start(), start()]
    for taker in takers:
        taker.tell(f"steps {count} {order}")
    assert [taker.hear() for taker in takers] == ["done", "done"]
    pids = order.read_text().split()
    assert len(pids) == 2 * count
    assert all(one != other for one, other in itertools.pairwise(pids))


def test_turns_never_overlap(make):
    """Many threads, each with a place of its own, count with a race in the middle."""
    count, held, overlaps = 100, [], []

    def compute(turns):
        for _ in range(count):
            with turns.mine():
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


def test_a_turn_that_fails_ends(make, tmp_path):
    turns = make()

    def fail():
        with turns.mine():
            assert is_held(tmp_path / "turn")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not is_held(tmp_path / "turn")


def test_one_thread_may_step_two_engines(make, sleeps):
    first, second = make(), make()
    for turns in (first, second, first, first, second):
        with turns.mine():
            pass
    assert sleeps == []  # nobody was in the way, so nobody waited


def test_a_killed_engine_gives_its_turn_to_who_waits(start, tmp_path):
    holder, waiter = start(), start()
    assert holder.ask("take") == "taken"
    waiter.tell("take")
    wait_until(lambda: is_held(tmp_path / "next"))
    holder.kill()
    assert waiter.hear() == "taken"
    assert is_held(tmp_path / "turn")


def test_a_killed_engine_that_was_next_keeps_nobody_out(start, make, tmp_path):
    waiter, turns = start(), make()
    with turns.mine():
        waiter.tell("take")
        wait_until(lambda: is_held(tmp_path / "next"))
        waiter.kill()
    with turns.mine():
        assert is_held(tmp_path / "turn")


def test_a_forked_child_does_not_keep_the_turn(start, tmp_path):
    holder = start()
    assert holder.ask("take") == "taken"
    child = psutil.Process(int(holder.ask("fork")))
    holder.kill()
    wait_until(lambda: not is_held(tmp_path / "turn"))
    assert child.status() != psutil.STATUS_ZOMBIE


def test_a_stopped_engine_delays_the_others_once(start, make, sleeps, caplog):
    stopped, turns = start(), make(longest_turn_s=BOUND_S)
    assert stopped.ask("take") == "taken"
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
        turns.mine().__enter__()


def test_an_engine_stopped_while_next_delays_the_others_once(start, make, sleeps, caplog, tmp_path):
    stopped, turns = start(), make(longest_turn_s=BOUND_S)
    with turns.mine():
        stopped.tell("take")
        wait_until(lambda: is_held(tmp_path / "next"))
        stopped.process.send_signal(signal.SIGSTOP)
    waited = count_sleeps_of_steps(turns, sleeps, 3)
    assert waited[0] > 0
    assert waited[1:] == [0, 0]
    assert len(caplog.records) == 1


def test_turns_go_on_with_who_was_stopped(start, make, sleeps, caplog, tmp_path):
    stopped, turns = start(), make(longest_turn_s=BOUND_S)
    assert stopped.ask("take") == "taken"
    stopped.process.send_signal(signal.SIGSTOP)
    count_sleeps_of_steps(turns, sleeps, 2)
    stopped.process.send_signal(signal.SIGCONT)
    assert stopped.ask("give") == "given"
    with turns.mine():
        assert is_held(tmp_path / "turn")
    assert len(caplog.records) == 1

    assert stopped.ask("take") == "taken"
    waited = count_sleeps_of_steps(turns, sleeps, 2)
    assert waited[0] > 0
    assert waited[1] == 0
    assert len(caplog.records) == 2, "another time that it hangs is told again"


def test_who_takes_another_turn_is_waited_for_again(start, make, sleeps, caplog):
    """One that is slow, rather than stopped, is given time in each of its turns."""
    slow, turns = start(), make(longest_turn_s=BOUND_S)
    for _ in range(3):
        assert slow.ask("take") == "taken"
        waited = count_sleeps_of_steps(turns, sleeps, 2)
        assert waited[0] > 0
        assert waited[1] == 0
        assert slow.ask("give") == "given"
    assert len(caplog.records) == 1


def count_sleeps_of_steps(turns, sleeps, num_steps):
    counts = []
    for _ in range(num_steps):
        sleeps.clear()
        with turns.mine():
            counts.append(len(sleeps))
    return counts


def test_who_waits_looks_less_often_with_time(start, make, sleeps):
    holder, turns = start(), make(longest_turn_s=BOUND_S)
    assert holder.ask("take") == "taken"
    with turns.mine():
        pass
    assert sleeps == sorted(sleeps)
    assert sleeps[0] == 0.0002
    assert max(sleeps) <= 0.001


def test_without_a_folder_every_step_runs_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    turns = Turns(None)
    with turns.mine(), turns.mine():
        pass
    turns.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_gives_up_the_place(make, tmp_path):
    turns = make()
    turns.close()
    turns.close()
    with turns.mine():
        assert not is_held(tmp_path / "turn")


def test_a_folder_that_takes_no_files_is_told(tmp_path):
    with pytest.raises(ConfigurationError, match=r"--turns-folder is .*/absent'.*No such file"):
        Turns(str(tmp_path / "absent"))
