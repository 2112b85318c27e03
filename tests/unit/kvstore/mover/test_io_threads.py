"""`IoThreads`, threads whose tasks may hang: reports, recovery, bounded waits."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from kvstore.mover import io_threads
from kvstore.mover.io_threads import IoThreads, patience_s

pytestmark = pytest.mark.alone

LONG_S = 10.0


class Rig:
    def __init__(self, num_threads: int = 2, most_of_group: int = 1) -> None:
        self.has_hung = threading.Semaphore(0)
        self.may_continue = threading.Event()
        self.ended = threading.Semaphore(0)
        self.done: list[int] = []
        self.threads = IoThreads(
            num_threads, "test-io", patience_s(0.0), self.has_hung.release, most_of_group
        )

    def submit(self, number: int, *, hangs: bool = False, group: str | None = None) -> None:
        self.threads.submit(self._do, number, hangs, group=group)

    def _do(self, number: int, hangs: bool) -> None:
        assert not hangs or self.may_continue.wait(LONG_S)
        self.done.append(number)
        self.ended.release()

    def wait_for_ends(self, count: int) -> None:
        for _ in range(count):
            assert self.ended.acquire(timeout=LONG_S)

    def wait_for_threads(self) -> None:
        self.may_continue.set()
        self.threads.close()
        for thread in self.threads._threads:
            if thread.ident:
                thread.join(LONG_S)
        assert self.threads.close()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(io_threads, "_MIN_PATIENCE_S", 0.05)
    rig = Rig()
    yield rig
    rig.wait_for_threads()


def test_tasks_begin_in_order_of_submission(rig: Rig) -> None:
    threads = IoThreads(1, "test-one", patience_s(1.0), lambda: None)
    for number in range(20):
        threads.submit(rig.done.append, number)
    threads.submit(rig.ended.release)
    rig.wait_for_ends(1)
    assert rig.done == list(range(20))
    assert threads.close()


def test_a_group_leaves_threads_to_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(num_threads=3, most_of_group=2)
    for number in range(5):
        rig.submit(number, hangs=True, group="a")
    for number in (5, 6):
        rig.submit(number, group="b")
    rig.submit(7)
    rig.wait_for_ends(3)
    assert rig.done == [5, 6, 7]  # while two tasks of group a hang and three wait
    rig.may_continue.set()
    rig.wait_for_ends(5)
    assert sorted(rig.done[3:]) == list(range(5))
    rig.wait_for_threads()
    assert not rig.threads._groups  # groups without tasks are forgotten


def test_hanging_is_reported_once_and_ends_with_a_task(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "baton.kvstore"):
        for number in range(3):
            rig.submit(number, hangs=True)
        assert rig.has_hung.acquire(timeout=LONG_S)
        assert rig.threads.is_hanging
        rig.may_continue.set()
        rig.wait_for_ends(3)
        rig.submit(3)
        rig.wait_for_ends(1)
        rig.wait_for_threads()
    assert not rig.threads.is_hanging
    assert not rig.has_hung.acquire(blocking=False)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_hanging_is_reported_again_after_a_recovery(rig: Rig) -> None:
    for _ in range(2):
        rig.submit(0, hangs=True)
        rig.submit(1, hangs=True)
        assert rig.has_hung.acquire(timeout=LONG_S)
        rig.may_continue.set()
        rig.wait_for_ends(2)
        rig.may_continue.clear()


def test_threads_do_not_count_as_hanging_while_one_is_free(rig: Rig) -> None:
    rig.submit(0, hangs=True)
    assert not rig.has_hung.acquire(timeout=0.2)
    rig.submit(1)
    rig.wait_for_ends(1)
    assert not rig.has_hung.acquire(timeout=0.2)
    rig.submit(2, hangs=True)
    assert rig.has_hung.acquire(timeout=LONG_S)


def test_idle_threads_do_not_count_as_hanging(rig: Rig) -> None:
    rig.submit(0)
    rig.wait_for_ends(1)
    assert not rig.has_hung.acquire(timeout=0.2)


def test_tasks_run_after_a_task_that_failed(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        rig.threads.submit(lambda: 1 // 0)
    rig.submit(0)
    rig.wait_for_ends(1)
    assert "ZeroDivisionError" in caplog.text


def test_close_drops_waiting_tasks_and_does_not_wait_for_hanging_ones(rig: Rig) -> None:
    for number in range(4):
        rig.submit(number, hangs=True)
    assert rig.has_hung.acquire(timeout=LONG_S)
    began_at = time.monotonic()
    assert not rig.threads.close()
    assert time.monotonic() - began_at < LONG_S / 2
    rig.wait_for_threads()
    rig.submit(9)
    assert sorted(rig.done) == [0, 1]


def test_drop_calls_the_replacement_of_each_waiting_task(rig: Rig) -> None:
    dropped: list[int] = []
    for number in range(4):
        rig.threads.submit(rig._do, number, True, instead=partial(dropped.append, number))
    assert rig.has_hung.acquire(timeout=LONG_S)
    rig.threads.drop()
    assert dropped == [2, 3]
    rig.may_continue.set()
    rig.wait_for_ends(2)
    assert sorted(rig.done) == [0, 1]


def test_a_process_exits_while_a_task_hangs() -> None:
    code = (
        "import threading; from kvstore.mover.io_threads import IoThreads\n"
        "has_begun = threading.Event()\n"
        "def hang():\n    has_begun.set()\n    threading.Event().wait()\n"
        "IoThreads(1, 'io', 1.0, print).submit(hang)\n"
        "assert has_begun.wait(10)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
