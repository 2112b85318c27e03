"""`ExtentTable`: what lies where in a store's memory, in a file that its processes map.

    header    see `Header`
    changes   a ring: which extents changed last
    extents   each one that was ever made; see `Extent`

It is made of cells of 8 bytes, each of which is changed at once, and mapped as C's structs: Python
gets at their fields in a third of the time of any code of its own. All of it is read and changed
under the store's lock, but for `Extent.generation`, which readers also look at without. A process
may be killed between any two cells: so what an extent says is true before its state says so,
everything else follows from the extents, and a cell tells that somebody was at it.

The file is sparse, and a page that cannot be had would kill who touches it: so there is memory
behind the header and the changes from the start, and behind an extent before there is one.
"""

import ctypes
import errno
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.block_key import KEY_BYTES

__all__ = ["Extent", "ExtentTable", "Header", "SeenObject", "State", "TableFullError"]

_FORMAT = int.from_bytes(b"BATONSH2", "little")
_MAX_EXTENTS = 1 << 22
_RING = 1 << 14
_CELL = ctypes.c_uint64


class State(IntEnum):
    """Of an extent. A file's zeros are none.

    AHEAD: memory is being put behind it, for an object that may come. It counts as spare.
    """

    FREE = 1
    WRITTEN_TO = 2
    OBJECT = 3
    AHEAD = 4


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


def _cells(*names: str) -> tuple[tuple[str, type[ctypes.c_uint64]], ...]:
    """Fields of a struct."""
    return tuple((name, _CELL) for name in names)


class Header(ctypes.Structure):
    """What is said of a table as a whole.

    Attributes:
        format: of the file.
        is_changing: whether somebody is at it; for who has just got the lock, whether the last
            holder did not get to its end.
        num_extents: that were ever made.
        num_changes: noted so far.
        object_bytes: of all objects, those being written too.
        spare_bytes: of free extents, those that have memory behind them, and those that are to
            have it of the ones that are being made ready.
    """

    format: int
    is_changing: int
    num_extents: int
    num_changes: int
    object_bytes: int
    spare_bytes: int

    __slots__ = ()  # no others
    _fields_ = _cells(
        "format", "is_changing", "num_extents", "num_changes", "object_bytes", "spare_bytes"
    )


class Extent(ctypes.Structure):
    """A run of bytes, and what lies there. From `ExtentTable`.

    Attributes:
        index: its number.
        offset: where it begins, in bytes.
        room: bytes up to the next.
        resident_bytes: of them, from the first, those that have memory behind them.
        num_bytes: of the object; that are being made ready, in whole pages.
        touched_ns: when it last was, by the machine's monotonic clock.
        generation: how many objects went from here.
        writer: who is writing it, or making it ready.
        state: see `State`.
    """

    index: int
    offset: int
    room: int
    resident_bytes: int
    num_bytes: int
    touched_ns: int
    generation: int
    writer: int
    state: int

    __slots__ = ("index",)  # is not in the file
    _fields_ = (
        *_cells("offset", "room", "resident_bytes", "num_bytes"),
        *_cells("touched_ns", "generation", "writer", "state"),
        ("_key", ctypes.c_ubyte * KEY_BYTES),
    )

    __hash__ = object.__hash__  # by identity, as they compare; a `Structure` has none

    @property
    def key(self) -> bytes:
        """Of the object."""
        key: bytes = _KEY.unpack_from(self, _KEY_AT)[0]
        return key

    @key.setter
    def key(self, key: bytes) -> None:
        _KEY.pack_into(self, _KEY_AT, key)

    def seen(self) -> SeenObject:
        """The object as it is."""
        return SeenObject(self.index, self.generation, self.touched_ns)


_KEY = struct.Struct(f"{KEY_BYTES}s")  # quicker than ctypes with bytes
_KEY_AT = Extent._key.offset


class _File(ctypes.Structure):
    """A whole table."""

    _fields_ = (
        ("header", Header),
        ("changes", _CELL * _RING),
        ("extents", Extent * _MAX_EXTENTS),
    )


_EXTENTS_AT = _File.extents.offset
_FILE_BYTES = ctypes.sizeof(_File)


class ExtentTable:
    """The table of one store, as one process maps it.

    Args:
        path: the file; made if absent, by whoever is first.

    Attributes:
        header: what is said of all of it.

    Raises:
        OSError: the file cannot be opened, or is of another format.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            _create(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(self._fd).st_size != _FILE_BYTES:
                raise _other_version(path)
            memory = mmap.mmap(self._fd, _FILE_BYTES)
            file = _File.from_buffer(memory)
            self.header: Header = file.header
            if self.header.format != _FORMAT:
                raise _other_version(path)
        except OSError:
            os.close(self._fd)
            raise
        self._changes: ctypes.Array[ctypes.c_uint64] = file.changes
        self._there: ctypes.Array[Extent] = file.extents
        self._columns = np.frombuffer(memory, Extent, offset=_EXTENTS_AT)
        self._extents: list[Extent] = []

    def __len__(self) -> int:
        """How many extents there are."""
        return self.header.num_extents

    def __getitem__(self, index: int) -> Extent:
        """The same one every time. Without the store's lock, one that was asked for before."""
        extents = self._extents
        while len(extents) <= index:
            extent = self._there[len(extents)]
            extent.index = len(extents)
            extents.append(extent)
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
        num_bytes = ctypes.sizeof(Extent)
        os.posix_fallocate(self._fd, _EXTENTS_AT + index * num_bytes, num_bytes)
        extent.offset, extent.room, extent.resident_bytes = self.end, room, 0
        extent.state = State.FREE
        self.header.num_extents = index + 1
        return extent

    def in_states(self, *states: State) -> list[Extent]:
        """Extents in one of these states."""
        found = np.flatnonzero(np.isin(self._of_extents()["state"], states))
        return [self[index] for index in found.tolist()]

    def by_age(self) -> Iterator[SeenObject]:
        """Objects, those that were not touched for longest first. Of thousands, so without a look
        at any by itself.
        """
        extents = self._of_extents()
        found = np.flatnonzero(extents["state"] == State.OBJECT)
        found = found[np.argsort(extents["touched_ns"][found])]
        facts = (extents[field][found] for field in ("generation", "touched_ns"))
        columns = found.tolist(), *(each.tolist() for each in facts)
        return map(SeenObject._make, zip(*columns, strict=True))

    def note_changes(self, extents: Iterable[Extent]) -> int:
        """Notes for other processes that extents' states or memory have changed; returns how many
        changes there are now.
        """
        changes, num_changes = self._changes, self.header.num_changes
        for extent in extents:
            changes[num_changes % _RING] = extent.index
            num_changes += 1
        self.header.num_changes = num_changes
        return num_changes

    def changes_since(self, num_seen: int) -> list[Extent] | None:
        """The extents of the changes after the first so many, each where it last changed; None if
        they are not known.
        """
        num_changes = self.header.num_changes
        if num_changes - num_seen > _RING:
            return None
        changes, numbers = self._changes, range(num_seen, num_changes)
        last_first = dict.fromkeys(changes[number % _RING] for number in reversed(numbers))
        return [self[index] for index in reversed(last_first)]

    def recount(self) -> None:
        """Finds out anew what follows from the extents; whoever asks for changes looks at all."""
        extents, header = self._of_extents(), self.header
        is_free, is_ahead = (extents["state"] == state for state in (State.FREE, State.AHEAD))
        num_bytes, resident_bytes = extents["num_bytes"], extents["resident_bytes"]
        header.object_bytes = int(num_bytes[~(is_free | is_ahead)].sum())
        header.spare_bytes = int(resident_bytes[is_free].sum() + num_bytes[is_ahead].sum())
        header.num_changes += _RING + 1

    def close(self) -> None:
        """Closes the file, which stays mapped for as long as somebody has an extent. Once."""
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _of_extents(self) -> npt.NDArray[np.void]:
        """What all say, `[extents]`, with a column for each of their cells."""
        return self._columns[: len(self)]


def _create(path: Path) -> None:
    """Makes an empty table, whole or not at all, unless somebody was first."""
    made = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, _FILE_BYTES)
        os.posix_fallocate(fd, 0, _EXTENTS_AT)
        os.pwrite(fd, bytes(Header(format=_FORMAT)), _File.header.offset)
        with suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.close(fd)
        made.unlink()


def _other_version(path: Path) -> OSError:
    return OSError(errno.EINVAL, "another version of Baton made it; remove it", str(path))
