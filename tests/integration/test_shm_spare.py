"""Spare memory of the shm store, which goes back where the file system has none left."""

import errno
import os

import pytest

from kvstore.conformance.objects import filled, random_keys, read
from kvstore.store import StoreUnavailableError
from kvstore.stores.shm.extent_table import State
from tests.support.shm_arena import opened, put


def test_a_put_into_full_memory_frees_spare_memory_first(monkeypatch):
    first, gone, second = random_keys(3)
    with opened() as (store, contents, _):
        put(store, first, 1, 1 << 20)
        put(store, gone, 1, 1 << 20)
        store.delete([gone])
        [spare] = contents.extents(State.FREE)
        assert spare.resident_bytes == 1 << 20
        spare.touched_ns = 0  # no reader can still use it
        allocate = os.posix_fallocate

        def allocate_if_none_is_spare(fd, *args):
            if fd == store._objects._memory._fd and contents.header.spare_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return allocate(fd, *args)

        monkeypatch.setattr(os, "posix_fallocate", allocate_if_none_is_spare)
        put(store, second, 2, 2 << 20)
        assert read(store, second, 2 << 20) == filled(2, 2 << 20).to_bytes()
        assert spare.resident_bytes == 0
        assert contents.memory_bytes() == 3 << 20
        contents.check()


def test_a_put_into_full_memory_skips_extents_that_may_still_be_read(monkeypatch):
    read_just_now, old, new = random_keys(3)
    with opened() as (store, contents, _):
        put(store, read_just_now, 1, 1 << 20)
        put(store, old, 1, 4 << 20)
        kept, freed = contents.objects()[read_just_now], contents.objects()[old]
        store.delete([read_just_now, old])
        freed.touched_ns = 0
        allocate = os.posix_fallocate

        def allocate_if_there_is_some(fd, start, num_bytes):
            if fd == store._objects._memory._fd and contents.memory_bytes() + num_bytes > 6 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return allocate(fd, start, num_bytes)

        monkeypatch.setattr(os, "posix_fallocate", allocate_if_there_is_some)
        put(store, new, 2, 3 << 20)
        assert read(store, new, 3 << 20) == filled(2, 3 << 20).to_bytes()
        assert kept.resident_bytes == 1 << 20
        assert freed.resident_bytes == 0
        contents.check()


def test_a_table_grows_into_spare_memory_and_a_failed_put_counts_no_change(monkeypatch):
    first, second, third = random_keys(3)
    with opened() as (store, contents, _):
        put(store, first, 1, 4 << 20)
        [spare] = contents.extents()
        store.delete([first])
        allocate = os.posix_fallocate

        def allocate_if_none_is_spare(fd, *args):
            if fd == store._objects._table._fd and contents.header.spare_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return allocate(fd, *args)

        monkeypatch.setattr(os, "posix_fallocate", allocate_if_none_is_spare)
        num_changes = contents.header.num_changes
        with pytest.raises(StoreUnavailableError, match="No space left"):
            put(store, second, 2, 8 << 20)  # the spare extent may still be read
        assert contents.header.num_changes == num_changes
        contents.check()
        spare.touched_ns = 0
        put(store, second, 2, 8 << 20)
        assert read(store, second, 8 << 20) == filled(2, 8 << 20).to_bytes()
        assert spare.resident_bytes == 0
        put(store, third, 3, 4 << 20)
        assert contents.objects()[third].index == spare.index
        contents.check()
