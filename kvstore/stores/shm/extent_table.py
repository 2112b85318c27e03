"""`ExtentTable`: what lies where in a store's memory, in a file that its processes map.

    header    cells of 8 bytes, see `_Header`
    changes   a ring of cells: which extents changed last
    extents   of each one that was ever made, `_CELLS` cells; see `Extent`

All of it is read and changed under the store's lock, but for `Extent.generation`, which readers
also look at without. A process may be killed between any two cells: so what an extent says is
true before its state says so, everything else follows from the extents, and a cell tells that
somebody was at it.

The file is sparse, and a page that cannot be had would kill who touches it: so there is memory
behind the header and the changes from the start, and behind an extent before there is one.
"""

import errno
import mmap
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.block_key import KEY_BYTES

__all__ = ["Extent", "ExtentTable", "SeenObject", "State", "TableFullError"]

_FORMAT = int.from_bytes(b"BATONSH1", "little")
_MAX_EXTENTS = 1 << 22
_RING = 1 << 14
_CELL_BYTES = 8


class _Header(IntEnum):
    FORMAT = 0
    IS_CHANGING = 1
    NUM_EXTENTS = 2
    NUM_CHANGES = 3
    OBJECT_BYTES = 4
    SPARE_BYTES = 5


class _Field(IntEnum):
    OFFSET = 0
    ROOM = 1
    RESIDENT_BYTES = 2
    NUM_BYTES = 3
    TOUCHED_NS = 4
    GENERATION = 5
    WRITER = 6
    STATE = 7
    KEY = 8


_CELLS = _Field.KEY + KEY_BYTES // _CELL_BYTES
_RING_AT = len(_Header)
_EXTENTS_AT = _RING_AT + _RING
_FILE_BYTES = (_EXTENTS_AT + _MAX_EXTENTS * _CELLS) * _CELL_BYTES


class State(IntEnum):
    """Of an extent. A file's zeros are none."""

    FREE = 1
    WRITTEN_TO = 2
    OBJECT = 3


class SeenObject(NamedTuple):
    """An object as it was seen: if its extent has another generation now, it has gone.

    Attributes:
        extent_index: where it is.
        generation: which object of the extent it is.
        touched_ns: see `Extent`.
    """

    extent_index: int
    generation: int
    touched_ns: int


class TableFullError(Exception):
    """There are as many extents as there can be."""


class _Cells(Protocol):
    """Who has `cells` of a table: its own begin `at` one of them."""

    at: int
    cells: "memoryview[int]"


class _Cell:
    """A number in a table, as an attribute of who has cells of it.

    Args:
        number: which of the cells of its owner it is in.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def __get__(self, owner: "_Cells", _: type) -> int:
        return owner.cells[owner.at + self._number]

    def __set__(self, owner: "_Cells", value: int) -> None:
        owner.cells[owner.at + self._number] = value


class Extent:
    """A run of bytes, and what lies there. From `ExtentTable`.

    Attributes:
        index: its number.
        cells: the table's.
        at: which of them are its.
        offset: where it begins, in bytes.
        room: bytes up to the next.
        resident_bytes: of them, from the first, those that have memory behind them.
        num_bytes: of the object.
        touched_ns: when it last was, by the machine's monotonic clock.
        generation: how many objects went from here.
        writer: who is writing it.
        state: see `State`.
    """

    __slots__ = ("at", "cells", "index")

    offset = _Cell(_Field.OFFSET)
    room = _Cell(_Field.ROOM)
    resident_bytes = _Cell(_Field.RESIDENT_BYTES)
    num_bytes = _Cell(_Field.NUM_BYTES)
    touched_ns = _Cell(_Field.TOUCHED_NS)
    generation = _Cell(_Field.GENERATION)
    writer = _Cell(_Field.WRITER)
    state = _Cell(_Field.STATE)

    def __init__(self, index: int, cells: "memoryview[int]") -> None:
        self.index, self.cells = index, cells
        self.at = _EXTENTS_AT + index * _CELLS

    @property
    def key(self) -> bytes:
        """Of the object."""
        return self.cells[self.at + _Field.KEY : self.at + _CELLS].tobytes()

    @key.setter
    def key(self, key: bytes) -> None:
        self.cells[self.at + _Field.KEY : self.at + _CELLS] = memoryview(key).cast("Q")

    def seen(self) -> SeenObject:
        """The object as it is."""
        return SeenObject(self.index, self.generation, self.touched_ns)


class ExtentTable:
    """The table of one store, as one process maps it.

    Args:
        path: the file; made if absent, by whoever is first.

    Attributes:
        cells: all of it.
        at: 0, where the header is.
        is_changing: whether somebody is at it; for who has just got the lock, whether the last
            holder did not get to its end.
        num_changes: noted so far.
        object_bytes: of all objects, those being written too.
        spare_bytes: of free extents, those that have memory behind them.

    Raises:
        OSError: the file cannot be opened, or is of another format.
    """

    at = 0
    is_changing = _Cell(_Header.IS_CHANGING)
    num_changes = _Cell(_Header.NUM_CHANGES)
    object_bytes = _Cell(_Header.OBJECT_BYTES)
    spare_bytes = _Cell(_Header.SPARE_BYTES)
    _format = _Cell(_Header.FORMAT)
    _num_extents = _Cell(_Header.NUM_EXTENTS)

    def __init__(self, path: Path) -> None:
        if not path.exists():
            _create(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(self._fd).st_size != _FILE_BYTES:
                raise _other_version(path)
            memory = mmap.mmap(self._fd, _FILE_BYTES)
            self.cells = memoryview(memory).cast("Q")
            if self._format != _FORMAT:
                raise _other_version(path)
        except OSError:
            os.close(self._fd)
            raise
        self._numbers = np.frombuffer(memory, np.uint64)
        self._extents: list[Extent] = []

    def __len__(self) -> int:
        """How many extents there are."""
        return self._num_extents

    def __getitem__(self, index: int) -> Extent:
        """The same one every time. Without the store's lock, one that was asked for before."""
        extents = self._extents
        while len(extents) <= index:
            extents.append(Extent(len(extents), self.cells))
        return extents[index]

    @property
    def end(self) -> int:
        """Where the last extent ends."""
        if not len(self):
            return 0
        last = self[len(self) - 1]
        return last.offset + last.room

    def add(self, room: int) -> Extent:
        """A new, free extent behind the last, of which nobody is told yet.

        Raises:
            OSError: there is no memory for it.
            TableFullError: there are too many.
        """
        index = len(self)
        if index == _MAX_EXTENTS:
            raise TableFullError
        extent = self[index]
        os.posix_fallocate(self._fd, extent.at * _CELL_BYTES, _CELLS * _CELL_BYTES)
        extent.offset, extent.room, extent.resident_bytes = self.end, room, 0
        extent.state = State.FREE
        self._num_extents = index + 1
        return extent

    def in_state(self, state: State) -> list[Extent]:
        """Extents in a state."""
        found = np.flatnonzero(self._of_extents()[:, _Field.STATE] == state)
        return [self[index] for index in found.tolist()]

    def by_age(self) -> Iterator[SeenObject]:
        """Objects, those that were not touched for longest first. Of thousands, so without a look
        at any by itself.
        """
        numbers = self._of_extents()
        found = np.flatnonzero(numbers[:, _Field.STATE] == State.OBJECT)
        found = found[np.argsort(numbers[found, _Field.TOUCHED_NS])]
        facts = (numbers[found, field] for field in (_Field.GENERATION, _Field.TOUCHED_NS))
        columns = found.tolist(), *(each.tolist() for each in facts)
        return map(SeenObject._make, zip(*columns, strict=True))

    def note_changes(self, extents: Iterable[Extent]) -> int:
        """Notes for other processes that extents' states or memory have changed; returns how many
        changes there are now.
        """
        cells, num_changes = self.cells, self.num_changes
        for extent in extents:
            cells[_RING_AT + num_changes % _RING] = extent.index
            num_changes += 1
        self.num_changes = num_changes
        return num_changes

    def changes_since(self, num_seen: int) -> list[Extent] | None:
        """The extents of the changes after the first so many, each once; None if they are not
        known.
        """
        num_changes = self.num_changes
        if num_changes - num_seen > _RING:
            return None
        cells, numbers = self.cells, range(num_seen, num_changes)
        return [self[index] for index in {cells[_RING_AT + number % _RING] for number in numbers}]

    def recount(self) -> None:
        """Finds out anew what follows from the extents; whoever asks for changes looks at all."""
        numbers = self._of_extents()
        is_free = numbers[:, _Field.STATE] == State.FREE
        self.object_bytes = int(numbers[~is_free, _Field.NUM_BYTES].sum())
        self.spare_bytes = int(numbers[is_free, _Field.RESIDENT_BYTES].sum())
        self.num_changes += _RING + 1

    def close(self) -> None:
        """Closes the file, which stays mapped for as long as somebody has an extent. Once."""
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _of_extents(self) -> npt.NDArray[np.uint64]:
        """The cells of all, `[extents, _CELLS]`."""
        return self._numbers[_EXTENTS_AT:].reshape(-1, _CELLS)[: len(self)]


def _create(path: Path) -> None:
    """Makes an empty table, whole or not at all, unless somebody was first."""
    made = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, _FILE_BYTES)
        os.posix_fallocate(fd, 0, _EXTENTS_AT * _CELL_BYTES)
        os.pwrite(fd, _FORMAT.to_bytes(_CELL_BYTES, sys.byteorder), _Header.FORMAT * _CELL_BYTES)
        with suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.close(fd)
        made.unlink()


def _other_version(path: Path) -> OSError:
    return OSError(errno.EINVAL, "another version of Baton made it; remove it", str(path))
