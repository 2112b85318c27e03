"""`IoThreads`: threads for calls that may never return, say to a file system that hangs."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

__all__ = ["IoThreads"]

# How many times longer than a call should take at most, and how long at least, none has to end.
_PATIENCE = 4
_LEAST_PATIENCE_S = 1.0

_logger = logging.getLogger("baton.kvstore")


class IoThreads:
    """Does tasks in threads, in their order, and tells when the threads hang.

    They hang when each has a task under way and none has ended for some times `timeout_s`;
    they do no longer when one ends. The process can end while they hang. Thread-safe.

    Args:
        num_threads: how many tasks are done at a time.
        name: of the threads.
        timeout_s: longest that a task should take.
        on_hang: called, in a thread of its own, when they begin to hang.
    """

    def __init__(
        self, num_threads: int, name: str, timeout_s: float, on_hang: Callable[[], None]
    ) -> None:
        self._patience_s = max(_PATIENCE * timeout_s, _LEAST_PATIENCE_S)
        self._on_hang = on_hang
        lock = threading.Lock()
        self._has_task = threading.Condition(lock)
        self._may_hang = threading.Condition(lock)
        # What to do, and what where it is dropped.
        self._tasks: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._num_under_way = 0
        self._progress_at = 0.0  # when a task last ended, or the last free thread was taken
        self._is_hanging = False
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{index}", daemon=True)
            for index in range(num_threads)
        ]
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)

    @property
    def is_hanging(self) -> bool:
        """Whether what is submitted now may wait for ever."""
        return self._is_hanging

    def submit(
        self, task: Callable[..., None], *args: object, instead: Callable[[], None] = lambda: None
    ) -> None:
        """Has a task done, unless `close` comes first, or `drop`, which calls `instead`."""
        with self._has_task:
            if self._is_closed:
                return
            if not self._watcher.ident:
                for thread in (*self._threads, self._watcher):
                    thread.start()
            self._tasks.append((partial(task, *args), instead))
            self._has_task.notify()

    def drop(self) -> int:
        """Drops tasks that have not begun, and does for each what is to be done instead; returns
        how many.
        """
        with self._has_task:
            dropped = list(self._tasks)
            self._tasks.clear()
        for _, instead in dropped:
            instead()
        return len(dropped)

    def close(self) -> bool:
        """Drops tasks that have not begun, and waits a bounded time for the others. Idempotent.

        Returns:
            Whether all have ended.
        """
        with self._has_task:
            self._is_closed = True
            self._tasks.clear()
            self._has_task.notify_all()
            self._may_hang.notify_all()
            started = [thread for thread in self._threads if thread.ident]
        give_up_at = time.monotonic() + (0.0 if self._is_hanging else self._patience_s)
        for thread in started:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        return not any(thread.is_alive() for thread in started)

    def _work(self) -> None:
        while (task := self._begin()) is not None:
            try:
                task()
            except Exception:
                _logger.exception("a task of %s failed", threading.current_thread().name)
            finally:
                self._end()

    def _begin(self) -> Callable[[], None] | None:
        with self._has_task:
            self._has_task.wait_for(lambda: self._tasks or self._is_closed)
            if self._is_closed:
                return None
            self._num_under_way += 1
            if self._num_under_way == len(self._threads):
                self._progress_at = time.monotonic()
                self._may_hang.notify()
            return self._tasks.popleft()[0]

    def _end(self) -> None:
        with self._has_task:
            self._num_under_way -= 1
            self._progress_at = time.monotonic()
            was_hanging, self._is_hanging = self._is_hanging, False
            if was_hanging:
                self._may_hang.notify()
        if was_hanging:
            _logger.info("calls of %s end again", threading.current_thread().name)

    def _watch(self) -> None:
        while self._wait_for_hang():
            _logger.warning(
                "%s: no call has ended for %g s; what needs one fails until one does",
                threading.current_thread().name,
                self._patience_s,
            )
            self._on_hang()

    def _wait_for_hang(self) -> bool:
        """Returns when the threads begin to hang; False once closed."""
        with self._may_hang:
            while not self._is_closed:
                if self._is_hanging or self._num_under_way < len(self._threads):
                    self._may_hang.wait()
                    continue
                left_s = self._progress_at + self._patience_s - time.monotonic()
                if left_s <= 0:
                    self._is_hanging = True
                    return True
                self._may_hang.wait(left_s)
        return False
