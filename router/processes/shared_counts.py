"""`SharedAccounts`: counts in memory that the processes of a router share.

A file is mapped by all of them. It is a table of buckets with a few rows each; a row has the key of
its client, a hash, and the numbers of `Counts`. The key says which bucket the row is in, so that
nothing moves, and a row is found by looking at one bucket.

    row      key (16 bytes) | two token buckets (2 numbers each) | running requests, by process

There is no leader, and nothing needs to be handed over when a process dies:

- Running requests are counted by process. Each process holds the lock of a file while it lives;
  whoever finds a limit reached looks whether the processes that count for it still do (`Counts`).
  A process that starts sets its own numbers to 0.
- A bucket is changed under the lock of a file, which the kernel releases if its holder dies. A
  holder that stands still (a debugger, SIGSTOP) is waited for 5 ms at most. What is then counted
  without the lock can lose one change of the holder: a limit is exceeded by that one call.
- A client whose bucket is full of others in use is counted by each process for itself, until a
  row is free. There are 65,536 rows.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from baton.common.errors import ConfigurationError
from router.processes.counts import (
    NUM_BUCKET_CELLS,
    Account,
    Accounts,
    Counts,
    LocalAccount,
    RunningIds,
)
from router.processes.place import ProcessPlace

__all__ = ["SharedAccounts", "create_shared_counts", "shared_counts_bytes"]

_LOGGER = logging.getLogger("baton.router")
_NUM_BUCKETS = 4096
_ROWS_PER_BUCKET = 16
_NUM_LOCKS = 16
_KEY_BYTES = 16
_KEY_CELLS = 2
_CELL_BYTES = 8
_NO_KEY = bytes(_KEY_BYTES)
_MAX_LOCK_WAIT_S = 0.005
_LOG_INTERVAL_S = 60.0
_TABLE = "counts"


def create_shared_counts(folder: Path, num_processes: int, num_buckets: int = _NUM_BUCKETS) -> None:
    """Makes the files of a table without counts.

    Args:
        folder: gets them.
        num_processes: the number of processes that will share it.
        num_buckets: how many buckets it has, each of 16 rows.

    Raises:
        ConfigurationError: the folder has no room for them.
    """
    num_bytes = shared_counts_bytes(num_processes, num_buckets)
    try:
        with (folder / _TABLE).open("wb") as file:
            # A process that writes to a page without memory behind it would be killed (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        raise ConfigurationError(
            f"cannot make {folder / _TABLE} with {num_bytes} bytes, where the processes of the "
            f"router count requests: {error.strerror}"
        ) from None
    names = [_lock_name(number) for number in range(_NUM_LOCKS)]
    for name in (*names, *map(_life_name, range(num_processes))):
        (folder / name).touch()


def shared_counts_bytes(num_processes: int, num_buckets: int = _NUM_BUCKETS) -> int:
    """Returns the size of the table of so many processes."""
    return num_buckets * _ROWS_PER_BUCKET * _CELL_BYTES * _row_cells(num_processes)


def _row_cells(num_processes: int) -> int:
    return _KEY_CELLS + NUM_BUCKET_CELLS + num_processes


def _lock_name(number: int) -> str:
    return f"lock-{number}"


def _life_name(process: int) -> str:
    return f"alive-{process}"


class SharedAccounts(Accounts):
    """The accounts of a router of several processes.

    Args:
        place: of this process. Its folder has the files of `create_shared_counts`.
        clock: seconds on a clock that all processes of the machine have in common.

    Attributes:
        clock: the same.
    """

    def __init__(self, place: ProcessPlace, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self.clock = clock
        self._folder = Path(place.folder)
        self._row_cells = _row_cells(place.count)
        self._life = _open(self._folder / _life_name(place.index))
        fcntl.flock(self._life, fcntl.LOCK_EX)  # others hold it for a moment, to look
        self._locks = [_open(self._folder / _lock_name(i)) for i in range(_NUM_LOCKS)]
        table = _open(self._folder / _TABLE)
        try:
            self._map = mmap.mmap(table, 0)
        finally:
            os.close(table)
        self._cells = memoryview(self._map).cast("d")
        self._num_buckets = len(self._cells) // self._row_cells // _ROWS_PER_BUCKET
        self._is_closed = False
        self._logged_at = -_LOG_INTERVAL_S
        self._forget_earlier_self()

    def close(self) -> None:
        """Releases the files; what this process counts as running is given back. Requests that end
        later are not counted.
        """
        self._is_closed = True
        for descriptor in (*self._locks, self._life):
            os.close(descriptor)

    @override
    def account(self, kind: str, name: str) -> Account:
        return _SharedAccount(self, kind, name)

    @override
    def running_ids(self, kind: str) -> RunningIds:
        return _SharedIds(self, kind)

    @contextmanager
    def open(self, key: bytes) -> Iterator[Counts | None]:
        """Opens the counts of a key; None if its bucket is full of others in use, or after `close`.

        Args:
            key: 16 bytes, evenly distributed and not all zero.
        """
        if self._is_closed:
            yield None
            return
        bucket = int.from_bytes(key[:4], "little") % self._num_buckets
        lock = self._locks[bucket % _NUM_LOCKS]
        is_locked = self._try_lock(lock)
        try:
            row = self._find(bucket, key)
            yield None if row is None else self._counts(row)
        finally:
            if is_locked:
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _forget_earlier_self(self) -> None:
        """Gives back what an earlier process of this place held when it died."""
        first = _KEY_CELLS + NUM_BUCKET_CELLS + self._place.index
        with self._cells[first :: self._row_cells] as running:
            for row, number in enumerate(running):
                if number:
                    running[row] = 0.0

    def _try_lock(self, lock: int) -> bool:
        deadline: float | None = None
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                now = time.monotonic()
                deadline = deadline or now + _MAX_LOCK_WAIT_S
                if now > deadline:
                    self._warn("another process does not release a lock of shared counts")
                    return False
                time.sleep(0)  # a holder needs some microseconds, unless it is not running

    def _find(self, bucket: int, key: bytes) -> int | None:
        """Returns the row of a key, perhaps one that was unused; None if all are in use."""
        rows = range(bucket * _ROWS_PER_BUCKET, (bucket + 1) * _ROWS_PER_BUCKET)
        keys = [self._read_key(row) for row in rows]
        if key in keys:
            return rows[keys.index(key)]
        row = rows[keys.index(_NO_KEY)] if _NO_KEY in keys else self._unused(rows)
        if row is None:
            self._warn("too many clients use their limits; each process counts further ones alone")
            return None
        cells = self._row(row)
        for index in range(_KEY_CELLS, self._row_cells):
            cells[index] = 0.0
        self._write_key(row, key)
        return row

    def _unused(self, rows: Sequence[int]) -> int | None:
        now = self.clock()
        return next((row for row in rows if self._counts(row).is_unused(now)), None)

    def _counts(self, row: int) -> Counts:
        return Counts(self._row(row)[_KEY_CELLS:], self._place.index, self._is_alive)

    def _row(self, row: int) -> "memoryview[float]":
        start = row * self._row_cells
        return self._cells[start : start + self._row_cells]

    def _read_key(self, row: int) -> bytes:
        start = row * self._row_cells * _CELL_BYTES
        return self._map[start : start + _KEY_BYTES]

    def _write_key(self, row: int, key: bytes) -> None:
        start = row * self._row_cells * _CELL_BYTES
        self._map[start : start + _KEY_BYTES] = key

    def _is_alive(self, process: int) -> bool:
        """Whether another process holds the lock of its life."""
        life = _open(self._folder / _life_name(process))
        try:
            fcntl.flock(life, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(life)
        return False

    def _warn(self, message: str) -> None:
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            _LOGGER.warning("%s", message)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _hashed(*names: str) -> bytes:
    """Returns the key of names, none of which can be mistaken for a part of another."""
    digest = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"baton.counts")
    for name in names:
        text = name.encode(errors="surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


class _SharedAccount(Account):
    """An account in the shared table, or in this process while the table has no row for it."""

    def __init__(self, table: SharedAccounts, *names: str) -> None:
        self._table = table
        self._key = _hashed(*names)
        self._local: LocalAccount | None = None

    @contextmanager
    @override
    def open(self) -> Iterator[Counts]:
        if self._local is not None:
            with self._local.open() as counts:
                yield counts
                if counts.is_unused(self._table.clock()):
                    self._local = None  # the next call looks for a row again
            return
        with self._table.open(self._key) as shared:
            if shared is not None:
                yield shared
                return
        self._local = LocalAccount()
        with self._local.open() as counts:
            yield counts


class _SharedIds(RunningIds):
    """The ids of all processes."""

    def __init__(self, table: SharedAccounts, kind: str) -> None:
        self._table = table
        self._kind = kind
        self._accounts: dict[tuple[str, str], Account] = {}

    @override
    def begin(self, client: str, request_id: str) -> bool:
        key = (client, request_id)
        account = _SharedAccount(self._table, self._kind, *key)
        with account.open() as counts:
            if key in self._accounts or not counts.has_room(1, 1):
                return False
            counts.add_running(1)
        self._accounts[key] = account
        return True

    @override
    def end(self, client: str, request_id: str) -> None:
        account = self._accounts.pop((client, request_id), None)
        if account is not None:
            with account.open() as counts:
                counts.add_running(-1)
