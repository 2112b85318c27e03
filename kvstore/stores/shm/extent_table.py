"""`ExtentTable`: which object lies where in a store's memory, in a file that processes map.

    header    see `Header`
    changes   a ring of the numbers of the extents that changed last
    extents   every extent that was ever made; see `Extent`

The table consists of cells of 8 bytes, which are written atomically, and is mapped as C structs:
ctypes reads their fields in a third of the time that Python code would take. It is read and changed
under the store's lock; only `Extent.generation` is also read without. A process may be killed
between any two writes. So an extent's fields are written before its state, everything else can be
computed from the extents, and `Header.is_changing` shows that a change was not completed.

The file is sparse, and writing an unallocated page of a full /dev/shm raises SIGBUS. So the pages
of the header and the changes are allocated from the start, and an extent's before it is made.
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

_FORMAT = b"BATONSH3"
_MAX_EXTENTS = 1 << 22
_RING = 1 << 14
_CELL = ctypes.c_uint64


class State(IntEnum):
    """The state of an extent. 0, as in a new file, is none of them."""

    FREE = 1
    WRITTEN_TO = 2
    OBJECT = 3


class SeenObject(NamedTuple):
    """An object as it was seen. If its extent has another generation now, it was removed.

    Attributes:
        extent_index: number of its extent.
        generation: of the extent; each object of an extent has another one.
        touched_ns: see `Extent`.
    """

    extent_index: int
    generation: int
    touched_ns: int


class TableFullError(Exception):
    """The table has no room for another extent."""


def _cells(*names: str) -> tuple[tuple[str, type[ctypes.c_uint64]], ...]:
    """Returns fields of a struct, each one cell."""
    return tuple((name, _CELL) for name in names)


class Header(ctypes.Structure):
    """The header of a table.

    Attributes:
        format: version of the file's format.
        is_changing: whether the lock's holder is changing the table. If it is set when a process
            gets the lock, the last holder died before it was done.
        num_extents: number of extents that were ever made.
        num_changes: number of changes noted so far.
        object_bytes: bytes of all objects, including those being written.
        spare_bytes: bytes of memory of free extents.
    """

    format: int
    is_changing: int
    num_extents: int
    num_changes: int
    object_bytes: int
    spare_bytes: int

    __slots__ = ()
    _fields_ = _cells(
        "format", "is_changing", "num_extents", "num_changes", "object_bytes", "spare_bytes"
    )


class Extent(ctypes.Structure):
    """A run of bytes, and what lies there. Made by `ExtentTable`.

    Attributes:
        index: its number in the table.
        offset: its first byte in the memory.
        room: bytes up to the next extent.
        resident_bytes: leading bytes that have memory.
        num_bytes: size of the object.
        touched_ns: last touch, by the machine's monotonic clock.
        generation: number of objects that were removed from here.
        writer: number of the writer that reserved it.
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

    __slots__ = ("index",)  # not in the file
    _fields_ = (
        *_cells("offset", "room", "resident_bytes", "num_bytes"),
        *_cells("touched_ns", "generation", "writer", "state"),
        ("_key", ctypes.c_ubyte * KEY_BYTES),
    )

    __hash__ = object.__hash__  # by identity, as for ==; a `Structure` defines none

    @property
    def key(self) -> bytes:
        """The object's key."""
        key: bytes = _KEY.unpack_from(self, _KEY_AT)[0]
        return key

    @key.setter
    def key(self, key: bytes) -> None:
        _KEY.pack_into(self, _KEY_AT, key)

    def seen(self) -> SeenObject:
        """Returns the object as it is now."""
        return SeenObject(self.index, self.generation, self.touched_ns)


_KEY = struct.Struct(f"{KEY_BYTES}s")  # faster than ctypes for bytes
_KEY_AT = Extent._key.offset


class _TableFile(ctypes.Structure):
    """The layout of the file."""

    _fields_ = (
        ("header", Header),
        ("changes", _CELL * _RING),
        ("extents", Extent * _MAX_EXTENTS),
    )


_EXTENTS_AT = _TableFile.extents.offset
_FILE_BYTES = ctypes.sizeof(_TableFile)


class ExtentTable:
    """The table of one store, as one process maps it.

    Args:
        path: the file; made if absent.

    Attributes:
        header: the table's header.

    Raises:
        OSError: the file cannot be opened, or is of another format.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            _create(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check_format(self._fd, path)
            memory = mmap.mmap(self._fd, _FILE_BYTES)
            file = _TableFile.from_buffer(memory)
            self.header: Header = file.header
        except OSError:
            os.close(self._fd)
            raise
        self._changes: ctypes.Array[ctypes.c_uint64] = file.changes
        self._there: ctypes.Array[Extent] = file.extents
        self._columns = np.frombuffer(memory, Extent, offset=_EXTENTS_AT)
        self._extents: list[Extent] = []

    def __len__(self) -> int:
        """Returns the number of extents."""
        return self.header.num_extents

    def __getitem__(self, index: int) -> Extent:
        """Returns the same object every time. Without the lock, only one returned before."""
        extents = self._extents
        while len(extents) <= index:
            extent = self._there[len(extents)]
            extent.index = len(extents)
            extents.append(extent)
        return extents[index]

    @property
    def end(self) -> int:
        """The offset behind the last extent."""
        if not len(self):
            return 0
        last = self[len(self) - 1]
        return last.offset + last.room

    def add(self, room: int) -> Extent:
        """Adds a free extent behind the last, without noting a change.

        Raises:
            OSError: there is no memory for its cells.
            TableFullError: the table is full.
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

    def in_state(self, state: State) -> list[Extent]:
        """Returns the extents in a state."""
        indices = np.flatnonzero(self._of_extents()["state"] == state)
        return [self[index] for index in indices.tolist()]

    def by_age(self) -> Iterator[SeenObject]:
        """Returns the objects, the least recently touched first; vectorized, for thousands."""
        extents = self._of_extents()
        indices = np.flatnonzero(extents["state"] == State.OBJECT)
        indices = indices[np.argsort(extents["touched_ns"][indices])]
        facts = (extents[field][indices] for field in ("generation", "touched_ns"))
        columns = indices.tolist(), *(fact.tolist() for fact in facts)
        return map(SeenObject._make, zip(*columns, strict=True))

    def note_changes(self, extents: Iterable[Extent]) -> int:
        """Notes for other processes that extents changed in state or memory; returns the number of
        changes so far.
        """
        changes, num_changes = self._changes, self.header.num_changes
        for extent in extents:
            changes[num_changes % _RING] = extent.index
            num_changes += 1
        self.header.num_changes = num_changes
        return num_changes

    def changes_since(self, num_seen: int) -> list[Extent] | None:
        """Returns the extents that changed after the first `num_seen` changes, in the order of
        their last change; None if the ring no longer has them all.
        """
        num_changes = self.header.num_changes
        if num_changes - num_seen > _RING:
            return None
        changes, numbers = self._changes, range(num_seen, num_changes)
        last_first = dict.fromkeys(changes[number % _RING] for number in reversed(numbers))
        return [self[index] for index in reversed(last_first)]

    def recount(self) -> None:
        """Computes the header from the extents, and makes all processes read all extents."""
        extents, header = self._of_extents(), self.header
        is_free = extents["state"] == State.FREE
        header.object_bytes = int(extents["num_bytes"][~is_free].sum())
        header.spare_bytes = int(extents["resident_bytes"][is_free].sum())
        header.num_changes += _RING + 1

    def close(self) -> None:
        """Closes the file. It stays mapped while any extent is referenced. Called once."""
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _of_extents(self) -> npt.NDArray[np.void]:
        """Returns all extents as a structured array, `[extents]`, with a column per cell."""
        return self._columns[: len(self)]


def _create(path: Path) -> None:
    """Makes an empty table atomically, unless another process was first."""
    made = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, _FILE_BYTES)
        os.posix_fallocate(fd, 0, _EXTENTS_AT)
        header = Header(format=int.from_bytes(_FORMAT, "little"))
        os.pwrite(fd, bytes(header), _TableFile.header.offset)
        with suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.close(fd)
        made.unlink()


def _check_format(fd: int, path: Path) -> None:
    """Refuses a table that another version of Baton made.

    Raises:
        OSError: names the formats of both versions, or the lengths of their files.
    """
    found, num_bytes = os.pread(fd, len(_FORMAT), 0), os.fstat(fd).st_size
    if found != _FORMAT:
        theirs, ours = (repr(each.decode("latin-1")) for each in (found, _FORMAT))
        difference = f"format {theirs}, this one has {ours}"
    elif num_bytes != _FILE_BYTES:
        difference = f"a table of {num_bytes} bytes, this one has {_FILE_BYTES}"
    else:
        return
    text = f"another version of Baton made it, with {difference}; remove it"
    raise OSError(errno.EINVAL, text, str(path))
