"""`Turns`: lets the engines of one machine compute one at a time, in turn.

    turns = Turns(folder)
    with turns.wait_for_turn():
        ...                     # compute on all cores

The folder holds two lock files. The engine that computes holds `turn`; the next
engine holds `next` while it waits for `turn`. An engine that has just computed
therefore cannot overtake the next one, and two engines that always have work
alternate. If several engines wait for `next`, each is equally likely to get it.

The files are locked with `flock`, which the system releases when a process dies.
A process may also be stopped during its turn. Each turn therefore begins with a
new stamp in `turn`, and an engine that waits longer than a limit for the stamp to
change runs its step without a turn, beside the other engine. Its later steps do
so without waiting, until `turn` is free or its stamp changes.

An engine whose streams wait with it writes its wish behind the stamp: how long a
turn of another engine may be, and how much longer for each sequence that comes to
it soon. The others read it when they schedule, and bound their steps. So it is
written before a turn ends: the next engine schedules at once. Of several wishes
the shortest counts. A wish is good for about a second and written again during
longer waits, so it need not be withdrawn. An engine that has just handed a request
over to another one heeds the last wish, however old: the other will decode, and
cannot write a new wish before the next step is scheduled.
"""

import fcntl
import logging
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, auto
from pathlib import Path

from baton.common.errors import ConfigurationError
from engine.runner import TurnWish

__all__ = ["Turns"]

_MAX_TURN_S = 10.0
"""Longer than any step for interactive use. If an engine's steps take longer anyway, the others
wait this long for each of them and then compute beside it."""

_MIN_SLEEP_S, _MAX_SLEEP_S = 0.0002, 0.001
_SLEEPS_PER_WAIT = 32
"""`flock` has no timeout, so an engine that waits for `turn` polls it after sleeping for this
fraction of the time that it has waited. A turn thus begins a few percent late at most, and
polling during a long wait uses little CPU time."""
_NEXT_SLEEP_S = 0.0005
"""Time between polls of `next`, equal for all engines however long they have waited."""

_STAMP_BYTES = 8
_WISH = struct.Struct("dddd")
"""Behind the stamp: `TurnWish.turn_s`, the time of the machine's monotonic clock until which the
wish is good, and its other two fields. An engine that still has the wish writes it again before."""
_MAX_WISH_S = 3600.0
_HANDED_OVER_S = 1.0
"""For so long after a handover, an old wish counts."""
_FILE_BYTES = _STAMP_BYTES + _WISH.size

_logger = logging.getLogger("baton.engine")


class _Wait(Enum):
    """How a wait for a lock ended.

    LOCKED: with the lock.
    OVERDUE: the turn of another engine lasts too long.
    WOKEN: the caller ended it.
    """

    LOCKED = auto()
    OVERDUE = auto()
    WOKEN = auto()


class Turns:
    """One engine's access to the turns of its machine: an `engine.runner.EngineTurns`.

    One thread at a time may wait for turns.

    Args:
        folder: folder of the lock files, the same for all engines that take turns; None
            to run every step without waiting.
        longest_turn_s: maximum wait for another engine's turn to end.
        read_compiling_s: returns how long this process has compiled kernels, which takes no turn
            but is no part of a step either.

    Attributes:
        wish: as in `engine.runner.EngineTurns`; other engines learn it when this one waits.

    Raises:
        ConfigurationError: the lock files cannot be created there.
    """

    def __init__(
        self,
        folder: str | None,
        longest_turn_s: float = _MAX_TURN_S,
        read_compiling_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._read_compiling_s = read_compiling_s
        self.wish: TurnWish | None = None
        self._written_wish = b""
        self._rewrite_at = 0.0
        self._heeds_old_until = -math.inf
        self._longest_turn_s = longest_turn_s
        self._files: tuple[int, ...] = () if folder is None else _open_files(Path(folder))
        self._seen_stamp: bytes | None = None
        self._seen_at = 0.0
        self._runs_beside = False
        self._has_turn = self._is_locked = False
        self._wait = 0.0, 0.0  # seconds waited before, and when the present wait began; 0: none
        _all_turns.add(self)

    @property
    def waited_s(self) -> float:
        """Seconds waited for turns and for compiled kernels in all, the present wait included. Any
        thread may read it.
        """
        return self._waited_for_turns_s + self._read_compiling_s()

    @property
    def _waited_for_turns_s(self) -> float:
        total, began = self._wait
        return total + (time.monotonic() - began if began else 0.0)

    @property
    def others_wish(self) -> TurnWish | None:
        """The shortest wish of another engine, if it is still good, or after a handover. Any thread
        may read it.
        """
        return self._read_wish(heeds_old=time.monotonic() < self._heeds_old_until)

    def handed_over(self) -> None:
        """Lets the last wish count for a moment, if its time is over; see `EngineTurns`."""
        self._heeds_old_until = time.monotonic() + _HANDED_OVER_S

    @contextmanager
    def wait_for_turn(self) -> Iterator[None]:
        """Waits for this engine's turn, unless `take` has, and keeps it until the block ends.
        Cannot be nested.
        """
        if not self._has_turn:
            self._lock_turn(_sleep)
        try:
            yield
        finally:
            self.end()

    def take(self, woken: threading.Event | None = None, timeout_s: float = math.inf) -> bool:
        """Waits for this engine's turn, for `wait_for_turn`; see `engine.runner.EngineTurns`."""
        if woken is None:
            return self._lock_turn(_try_once)
        ends_at = time.monotonic() + timeout_s

        def nap(seconds: float) -> bool:
            return woken.wait(seconds) or time.monotonic() >= ends_at

        return self._lock_turn(nap)

    def end(self) -> None:
        """Ends the turn, if there is one. The next engine finds the wish of the step before it."""
        if self._has_turn and self._files:
            self._write_wish()
        if self._is_locked and self._files:
            fcntl.flock(self._files[1], fcntl.LOCK_UN)
        self._has_turn = self._is_locked = False

    def close(self) -> None:
        """Closes the lock files: steps run without waiting from now on. Idempotent."""
        files, self._files = self._files, ()
        for file in files:
            os.close(file)

    def _lock_turn(self, nap: "_Nap") -> bool:
        """Locks and stamps `turn`, or computes beside another engine whose turn lasts too long.

        Returns:
            Whether this engine may compute; False if `nap` ended the wait.
        """
        if not self._files:
            self._has_turn = True
            return True
        self._wait = self._wait[0], time.monotonic()
        self._write_wish()
        try:
            ending = self._lock_next_then_turn(nap)
        finally:
            self._wait = self._waited_for_turns_s, 0.0
        if ending is _Wait.WOKEN:
            return False
        self._has_turn, self._is_locked = True, ending is _Wait.LOCKED
        if self._is_locked:
            with suppress(OSError):  # without a new stamp, the turn only looks longer to others
                os.pwrite(self._files[1], os.urandom(_STAMP_BYTES), 0)
        elif not self._runs_beside:
            _logger.warning(
                "another engine has been computing, or next in turn, for %g s: is it stopped? "
                "Not waiting for it any more",
                self._longest_turn_s,
            )
        self._runs_beside = not self._is_locked
        return True

    def _read_wish(self, *, heeds_old: bool) -> TurnWish | None:
        """Returns the wish in the file, unless it is this engine's own.

        Args:
            heeds_old: whether a wish counts whose time is over.
        """
        files = self._files
        try:
            record = os.pread(files[1], _WISH.size, _STAMP_BYTES) if files else b""
        except OSError:
            return None  # the files lie on another machine, or were just closed
        if len(record) < _WISH.size or record == self._written_wish:
            return None
        turn_s, good_until, sequence_s, max_s = _WISH.unpack(record)
        # A later time is that of a clock before the machine was started again.
        now = time.monotonic()
        oldest = 0.0 if heeds_old else now
        is_good = oldest < good_until <= now + _time_good_s(turn_s)
        if not (is_good and 0 < turn_s <= _MAX_WISH_S and 0 <= sequence_s <= _MAX_WISH_S):
            return None
        return TurnWish(turn_s, sequence_s, max_s)

    def _write_wish(self) -> None:
        """Writes the wish, unless another engine's is shorter and still good."""
        wish, others_wish = self.wish, self._read_wish(heeds_old=False)
        if wish is None or (others_wish is not None and others_wish.turn_s < wish.turn_s):
            return
        good_s = _time_good_s(wish.turn_s)
        self._rewrite_at = time.monotonic() + good_s / 2
        good_until = time.monotonic() + good_s
        self._written_wish = _WISH.pack(wish.turn_s, good_until, wish.sequence_s, wish.max_s)
        with suppress(OSError):  # the other engines' turns are as long as before
            os.pwrite(self._files[1], self._written_wish, _STAMP_BYTES)

    def _lock_next_then_turn(self, nap: "_Nap") -> _Wait:
        next_file, turn = self._files
        ending = self._wait_for_lock(next_file, nap, _NEXT_SLEEP_S, _NEXT_SLEEP_S)
        if ending is not _Wait.LOCKED:
            return ending
        try:
            return self._wait_for_lock(turn, nap, _MIN_SLEEP_S, _MAX_SLEEP_S)
        finally:
            fcntl.flock(next_file, fcntl.LOCK_UN)

    def _wait_for_lock(
        self, file: int, nap: "_Nap", shortest_sleep_s: float, longest_sleep_s: float
    ) -> _Wait:
        """Locks `file`, unless one turn lasts too long before that, or `nap` ends the wait."""
        started = time.monotonic()
        while not _try_lock(file):
            now = time.monotonic()
            if self._is_overdue(now):
                return _Wait.OVERDUE
            if now >= self._rewrite_at:  # the turn that it waits for is a long one
                self._write_wish()
            pause_s = (now - started) / _SLEEPS_PER_WAIT
            if nap(min(max(pause_s, shortest_sleep_s), longest_sleep_s)):
                return _Wait.WOKEN
        return _Wait.LOCKED

    def _is_overdue(self, now: float) -> bool:
        stamp = os.pread(self._files[1], _STAMP_BYTES, 0)
        if stamp != self._seen_stamp:
            self._seen_stamp, self._seen_at = stamp, now
        return now - self._seen_at >= self._longest_turn_s


_Nap = Callable[[float], bool]
"""Sleeps for some seconds; returns whether to end the wait."""


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _try_once(seconds: float) -> bool:
    return True


def _open_files(folder: Path) -> tuple[int, int]:
    """Opens `next` and `turn`. Fills the latter, so that later writes need no disk space."""
    with ExitStack() as opened:
        try:
            next_file, turn = (_open(folder / name, opened) for name in ("next", "turn"))
            if (size := os.fstat(turn).st_size) < _FILE_BYTES:
                os.pwrite(turn, bytes(_FILE_BYTES - size), size)
        except OSError as error:
            raise ConfigurationError(
                f"--turns-folder is {str(folder)!r}; cannot create lock files there: "
                f"{error.strerror}"
            ) from None
        opened.pop_all()
    return next_file, turn


def _open(path: Path, opened: ExitStack) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    opened.callback(os.close, file)
    return file


def _time_good_s(wish_s: float) -> float:
    """Returns for how long a wish is good: longer than from one turn of its engine to the next."""
    return max(1.0, 4 * wish_s)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems do not support locks
        raise ConfigurationError(
            f"files in the --turns-folder cannot be locked: {error.strerror}"
        ) from None
    return True


_all_turns: "weakref.WeakSet[Turns]" = weakref.WeakSet()


def _close_all() -> None:
    for turns in list(_all_turns):
        turns.close()


# A forked child shares its parent's locks, so a turn could outlive the parent. (Python closes the
# descriptors on exec.)
os.register_at_fork(after_in_child=_close_all)
