"""`IoThreads`: threads for calls that may never return, such as those of a hanging file system."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

__all__ = ["IoThreads", "patience_s"]

# The threads hang if no call ends for this many times the longest time of a call, or this long.
_PATIENCE = 4
_MIN_PATIENCE_S = 1.0

_logger = logging.getLogger("baton.kvstore")


def patience_s(timeout_s: float) -> float:
    """Returns after which time without an end threads hang whose calls take at most `timeout_s`."""
    return max(_PATIENCE * timeout_s, _MIN_PATIENCE_S)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    run: Callable[[], None]
    drop: Callable[[], None]  # called instead if the task is dropped
    group: Hashable


class IoThreads:
    """Runs tasks in threads, in the order of submission, and detects when all threads hang.

    At most `most_of_group` tasks of a group run at a time; tasks of other groups overtake the rest.

    The threads hang when each runs a task and none has ended for `patience_s`. They stop hanging
    when one ends. They are daemons, so the process can end while they hang. Thread-safe.

    Args:
        num_threads: most tasks that run at a time.
        name: prefix of the threads' names.
        patience_s: see above.
        on_hang: called in a thread of its own when the threads begin to hang.
        most_of_group: most tasks of a group that run at a time.
        log_level: of the line that says so; that they do not hang any more is less serious.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        patience_s: float,
        on_hang: Callable[[], None],
        most_of_group: int = 1,
        log_level: int = logging.WARNING,
    ) -> None:
        self._most_of_group = most_of_group
        self._patience_s = patience_s
        self._log_level = log_level
        self._on_hang = on_hang
        lock = threading.Lock()
        self._has_task = threading.Condition(lock)
        self._may_hang = threading.Condition(lock)
        self._tasks: deque[_Task] = deque()
        self._num_under_way = 0
        self._groups: Counter[Hashable] = Counter()  # running tasks of each group
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
        """Whether all threads hang, so that a new task may wait for ever."""
        return self._is_hanging

    def submit(
        self,
        task: Callable[..., None],
        *args: object,
        instead: Callable[[], None] = lambda: None,
        group: Hashable = None,
    ) -> None:
        """Runs a task later, unless `close` or `drop` is called before it begins.

        Args:
            task: the task.
            args: its arguments.
            instead: called if `drop` drops the task.
            group: the task's group; None if it belongs to none.
        """
        with self._has_task:
            if self._is_closed:
                return
            if not self._watcher.ident:
                for thread in (*self._threads, self._watcher):
                    thread.start()
            self._tasks.append(_Task(partial(task, *args), instead, group))
            self._has_task.notify()

    def drop(self) -> int:
        """Drops tasks that have not begun, and calls `instead` of each; returns their number."""
        with self._has_task:
            dropped = list(self._tasks)
            self._tasks.clear()
        for task in dropped:
            task.drop()
        return len(dropped)

    def close(self) -> bool:
        """Drops tasks that have not begun, and waits a bounded time for the others. Idempotent.

        Returns:
            Whether all tasks have ended.
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
                task.run()
            except Exception:
                _logger.exception("a task of %s failed", threading.current_thread().name)
            finally:
                self._end(task)

    def _begin(self) -> _Task | None:
        with self._has_task:
            while not self._is_closed:
                if (task := self._next()) is None:
                    self._has_task.wait()
                    continue
                self._tasks.remove(task)
                self._groups[task.group] += 1
                self._num_under_way += 1
                if self._num_under_way == len(self._threads):
                    self._progress_at = time.monotonic()
                    self._may_hang.notify()
                return task
        return None

    def _next(self) -> _Task | None:
        """Returns the first task that may begin; None if there is none."""
        return next((task for task in self._tasks if self._may_begin(task)), None)

    def _may_begin(self, task: _Task) -> bool:
        return task.group is None or self._groups[task.group] < self._most_of_group

    def _end(self, task: _Task) -> None:
        # No notification is needed: at most one more task may begin now, and this thread takes it.
        with self._has_task:
            self._groups[task.group] -= 1
            if not self._groups[task.group]:
                del self._groups[task.group]
            self._num_under_way -= 1
            self._progress_at = time.monotonic()
            was_hanging, self._is_hanging = self._is_hanging, False
            if was_hanging:
                self._may_hang.notify()
        if was_hanging:
            level = min(logging.INFO, self._log_level)
            _logger.log(level, "calls of %s end again", threading.current_thread().name)

    def _watch(self) -> None:
        while self._wait_for_hang():
            _logger.log(
                self._log_level,
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
