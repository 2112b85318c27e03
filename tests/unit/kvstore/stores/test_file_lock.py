"""`FileLock`, a lock between threads and processes: limits of waits."""

import time
from contextlib import closing

import pytest

from kvstore.store import StoreUnavailableError
from kvstore.stores import files
from kvstore.stores.files import FileLock


@pytest.mark.parametrize("is_own", [True, False], ids=["thread", "process"])
def test_a_deadline_before_the_timeout_ends_the_wait(tmp_path, is_own):
    with (
        closing(FileLock(tmp_path / "lock", timeout_s=600)) as lock,
        closing(FileLock(tmp_path / "lock", timeout_s=600)) as other,
    ):
        waiting = lock if is_own else other
        with lock.locked():
            for deadline_s in (0, time.monotonic() + 0.01):
                with pytest.raises(StoreUnavailableError), waiting.locked(deadline_s):
                    pytest.fail("the lock has two owners")
        with other.locked(0):
            pass


def test_a_thread_that_waits_for_the_lock_tries_ever_less_often(tmp_path, monkeypatch):
    tries, try_lock = [], files.try_lock
    monkeypatch.setattr(files, "try_lock", lambda fd: tries.append(fd) or try_lock(fd))
    with (
        closing(FileLock(tmp_path / "lock", timeout_s=0.5)) as lock,
        closing(FileLock(tmp_path / "lock", timeout_s=0.5)) as other,
        lock.locked(),
        pytest.raises(StoreUnavailableError),
        other.locked(),
    ):
        pytest.fail("the lock has two owners")
    assert len(tries) < 1000
