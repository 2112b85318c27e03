"""A `shm://` store, and direct access to its memory."""

import errno
import os
import shutil
import uuid
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvstore.conformance.objects import blank, filled
from kvstore.registry import open_store
from kvstore.stores.shm.extent_table import ExtentTable, State
from kvstore.stores.shm.mapped_memory import MappedMemory

__all__ = ["ArenaContents", "interposed", "needs_shared_memory", "opened", "put", "refusing"]


class ArenaContents:
    """Reads the files of an existing store, without locks."""

    def __init__(self, folder):
        self.folder = folder
        self.table = ExtentTable(folder / "table")
        self.header = self.table.header
        self.memory = MappedMemory(folder / "memory")

    def close(self):
        """Closes the files."""
        self.memory.close()
        self.table.close()

    def extents(self, *states):
        """Returns the extents in one of these states, or all if no state is given."""
        of_table = (self.table[index] for index in range(len(self.table)))
        return [extent for extent in of_table if not states or extent.state in states]

    def objects(self):
        """Returns the extents of objects by key."""
        extents = self.extents(State.OBJECT)
        by_key = {extent.key: extent for extent in extents}
        assert len(by_key) == len(extents), "two objects of one key"
        return by_key

    def bytes_at(self, extent):
        """Returns the bytes of an object."""
        value = blank(extent.num_bytes)
        self.memory.read([(extent.offset, value)])
        return value.to_bytes()

    def memory_bytes(self):
        """Returns the memory that the file of objects really takes."""
        return (self.folder / "memory").stat().st_blocks * 512

    def check(self):
        """Checks the invariants of the extent table and its header."""
        extents, header = self.extents(), self.header
        assert all(extent.state in list(State) for extent in extents)
        ends = [0, *(extent.offset + extent.room for extent in extents)]
        assert [extent.offset for extent in extents] == ends[:-1]
        assert all(extent.resident_bytes <= extent.room for extent in extents)
        free = self.extents(State.FREE)
        taken = self.extents(State.WRITTEN_TO, State.OBJECT)
        assert sum(extent.num_bytes for extent in taken) == header.object_bytes
        assert sum(extent.resident_bytes for extent in free) == header.spare_bytes
        assert not header.is_changing

    def check_index(self, arena):
        """Checks that the up-to-date index of an `Arena` of this process agrees with the table."""
        with arena._locked():
            index = arena._space._index
            by_key = {key: extent.index for key, extent in index._by_key.items()}
            assert by_key == {key: extent.index for key, extent in self.objects().items()}
            free = {
                extent.index: kind for kind, extents in index._free.items() for extent in extents
            }
            assert free == {
                extent.index: (extent.room, bool(extent.resident_bytes))
                for extent in self.extents(State.FREE)
            }
            spare = {extent.index for extent in index._spare}
            assert spare == {number for number, (_, has_memory) in free.items() if has_memory}


@contextmanager
def opened(**options):
    """Yields a new store, its `ArenaContents`, and its URL."""
    name = f"test-{uuid.uuid4().hex}"
    query = "&".join(f"{key}={value}" for key, value in {"lease_s": 0, **options}.items())
    url = f"shm://{name}?{query}"
    folder = Path(f"/dev/shm/baton-{name}")
    try:
        with closing(open_store(url)) as store:
            contents = ArenaContents(folder)
            with closing(contents):
                yield store, contents, url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def needs_shared_memory(num_bytes):
    """Skips a test if /dev/shm has less space left, as in a container with Docker's default."""
    free_bytes = shutil.disk_usage("/dev/shm").free
    if free_bytes < num_bytes:
        left, needed = free_bytes >> 20, num_bytes >> 20
        pytest.skip(f"/dev/shm has {left} MiB left, and the test needs {needed} MiB")


def put(store, key, byte, num_bytes):
    """Puts an object that repeats one byte."""
    store.put([key], [filled(byte, num_bytes)])


def interposed(monkeypatch, name, act):
    """Calls `act` once, at the start of the next call of a method of `MappedMemory`."""
    call = getattr(MappedMemory, name)
    todo = [act]

    def act_and_call(*args):
        if todo:
            todo.pop()()
        return call(*args)

    monkeypatch.setattr(MappedMemory, name, act_and_call)


@contextmanager
def refusing(monkeypatch, num_calls):
    """Makes `os.posix_fallocate` fail with ENOSPC after `num_calls` calls."""
    left, allocate = iter(range(num_calls)), os.posix_fallocate

    def allocate_or_refuse(*args):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allocate(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", allocate_or_refuse)
        yield
