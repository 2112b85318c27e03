"""`Turns`: engines of one machine compute one at a time, in turn.

    turns = Turns(folder)
    with turns.mine():
        ...                     # compute on all cores

Two lock files lie in the folder. Who computes holds `turn`; who is next holds
`next` while it waits for `turn`. So who has just computed cannot overtake who
is next, and two engines that both always want to compute alternate. Of several
that want to be next any may be the one, as likely as the others.

`flock` is what the system drops when a process dies, however it dies. But a
process may also be stopped during its turn. So each turn is stamped when it
is taken, and nobody waits longer than a bound for a stamp to change: the step
then runs beside whoever computes, and those after it do so without waiting,
until the turn is free or is someone else's.
"""

import fcntl
import logging
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from baton.errors import ConfigurationError

__all__ = ["Turns"]

_LONGEST_TURN_S = 10.0
"""Longer than a step during which anyone still waits for tokens. Where steps are longer all the
same, others wait this long for each of them, and then compute beside it."""

_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 0.0002, 0.001
_SLEEPS_PER_WAIT = 32
"""`flock` knows no timeout: who waits looks again after this share of the time that it has waited.
So a turn begins a few percent late at most, and a long wait takes little from who computes."""
_LINE_SLEEP_S = 0.0005
"""Between looks of those who want to be next: the same for all, however long they have waited."""

_STAMP_BYTES = 8

_logger = logging.getLogger("baton.engine")


class Turns:
    """One engine's place among those of its machine; for one thread at a time.

    Args:
        folder: the same for all that take turns; None: every step runs at once.
        longest_turn_s: how long to wait for a turn that does not end.

    Raises:
        ConfigurationError: the lock files cannot be made there.
    """

    def __init__(self, folder: str | None, longest_turn_s: float = _LONGEST_TURN_S) -> None:
        self._longest_turn_s = longest_turn_s
        self._files = () if folder is None else _open_files(Path(folder))
        self._seen_stamp: bytes | None = None
        self._seen_at = 0.0
        self._runs_beside = False
        _all_turns.add(self)

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Waits for the turn and keeps it until the block ends. Not to be nested."""
        if not self._files or not self._take(*self._files):
            yield
            return
        _, turn = self._files
        try:
            yield
        finally:
            fcntl.flock(turn, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives up the place: steps run at once from now on. Idempotent."""
        files, self._files = self._files, ()
        for file in files:
            os.close(file)

    def _take(self, line: int, turn: int) -> bool:
        """Whether the turn came, before it was given up on."""
        came = self._take_in_line(line, turn)
        if came:
            with suppress(OSError):  # where even this finds no room, turns only look longer
                os.pwrite(turn, os.urandom(_STAMP_BYTES), 0)
        elif not self._runs_beside:
            _logger.warning(
                "another engine has been computing, or next in turn, for %g s: is it stopped? "
                "Not waiting for it any more",
                self._longest_turn_s,
            )
        self._runs_beside = not came
        return came

    def _take_in_line(self, line: int, turn: int) -> bool:
        if not self._wait_for(line, turn, _LINE_SLEEP_S, _LINE_SLEEP_S):
            return False
        try:
            return self._wait_for(turn, turn, _SHORTEST_SLEEP_S, _LONGEST_SLEEP_S)
        finally:
            fcntl.flock(line, fcntl.LOCK_UN)

    def _wait_for(
        self, file: int, turn: int, shortest_sleep_s: float, longest_sleep_s: float
    ) -> bool:
        """Whether `file` could be locked before one turn had lasted too long."""
        started = time.monotonic()
        while not _try_lock(file):
            now = time.monotonic()
            if self._is_overdue(turn, now):
                return False
            pause_s = (now - started) / _SLEEPS_PER_WAIT
            time.sleep(min(max(pause_s, shortest_sleep_s), longest_sleep_s))
        return True

    def _is_overdue(self, turn: int, now: float) -> bool:
        stamp = os.pread(turn, _STAMP_BYTES, 0)
        if stamp != self._seen_stamp:
            self._seen_stamp, self._seen_at = stamp, now
        return now - self._seen_at >= self._longest_turn_s


def _open_files(folder: Path) -> tuple[int, int]:
    """`next` and `turn`, which holds a stamp, so that later ones need no more room."""
    with ExitStack() as opened:
        try:
            line, turn = (_open(folder / name, opened) for name in ("next", "turn"))
            if not os.fstat(turn).st_size:
                os.pwrite(turn, bytes(_STAMP_BYTES), 0)
        except OSError as error:
            raise ConfigurationError(
                f"--turns-folder is {str(folder)!r}; cannot make lock files there: {error.strerror}"
            ) from None
        opened.pop_all()
    return line, turn


def _open(path: Path, opened: ExitStack) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    opened.callback(os.close, file)
    return file


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems know no locks
        raise ConfigurationError(
            f"files in the --turns-folder cannot be locked: {error.strerror}"
        ) from None
    return True


_all_turns: "weakref.WeakSet[Turns]" = weakref.WeakSet()


def _close_all() -> None:
    for turns in list(_all_turns):
        turns.close()


# A forked child has the same locks: its parent's turn would outlive the parent. (What it executes
# does not: Python's descriptors are closed on exec.)
os.register_at_fork(after_in_child=_close_all)
