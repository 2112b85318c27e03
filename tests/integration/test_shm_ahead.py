"""Memory that the shm store allocates ahead of the next puts."""

import errno
import os
import threading
from contextlib import closing, suppress

import pytest

from kvstore.conformance.objects import filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import StoreUnavailableError
from kvstore.stores import files
from kvstore.stores.shm import mapped_memory, memory_ahead
from kvstore.stores.shm.extent_table import State
from tests.support.shm_arena import interposed, needs_shared_memory, opened, put, refusing


def _await_ahead(store):
    """Waits until the requested memory is allocated or was refused."""
    ahead = store._ahead
    with ahead._changed:
        assert ahead._changed.wait_for(lambda: not (ahead._is_requested or ahead._is_busy), 30)


def _await_closed(store):
    """Waits until the thread that allocates memory ahead has ended."""
    store._ahead._thread.join(30)


def _refuse_memory(patched):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "full")

    patched.setattr(os, "posix_fallocate", refuse)


def test_memory_is_allocated_ahead_for_the_next_put(monkeypatch):
    first, second, third = random_keys(3)
    with opened() as (store, contents, _):
        put(store, first, 1, 1 << 20)
        _await_ahead(store)
        assert contents.header.spare_bytes == 1 << 20
        assert contents.memory_bytes() == 2 << 20
        contents.check()
        [spare] = contents.extents(State.FREE)
        with monkeypatch.context() as patched:
            _refuse_memory(patched)  # so that only spare memory can serve the put
            put(store, second, 2, 1 << 20)
            _await_ahead(store)
            assert contents.objects()[second].index == spare.index
            with pytest.raises(StoreUnavailableError):
                put(store, third, 3, 1 << 20)
        assert store.stats().num_bytes == 2 << 20
        put(store, third, 3, 1 << 20)
        _await_ahead(store)
        assert contents.table.header.spare_bytes == 1 << 20
        for byte, key in enumerate((first, second, third), 1):
            assert read(store, key, 1 << 20) == filled(byte, 1 << 20).to_bytes()


def test_memory_ahead_evicts_nothing_and_keeps_the_bound(monkeypatch):
    keys, most, map_in = random_keys(40), [], mapped_memory.MappedMemory.map_in
    with opened(max_bytes=32 << 20) as (store, contents, _):

        def look_and_map_in(memory, start, num_bytes):
            assert contents.header.object_bytes == len(contents.objects()) << 20
            most.append(contents.header.object_bytes + contents.header.spare_bytes)
            map_in(memory, start, num_bytes)

        monkeypatch.setattr(mapped_memory.MappedMemory, "map_in", look_and_map_in)
        for index, key in enumerate(keys[:32]):
            put(store, key, index, 1 << 20)
            _await_ahead(store)
            header = contents.header
            assert header.object_bytes == (index + 1) << 20
            assert header.spare_bytes <= min(4 << 20, (32 << 20) - header.object_bytes)
        assert store.stats().evictions == 0
        assert contents.memory_bytes() == 32 << 20
        for index, key in enumerate(keys[32:]):
            put(store, key, index, 1 << 20)
            _await_ahead(store)
        assert store.stats().evictions == 8
        assert contents.memory_bytes() == 32 << 20
        assert 2 << 20 <= max(most) < 32 << 20


def test_memory_being_allocated_ahead_takes_no_room_from_objects(monkeypatch):
    keys, held = random_keys(16), []
    with opened(max_bytes=16 << 20, lease_s=600) as (store, contents, url):

        def fill():
            with closing(open_store(url)) as other:
                other.put(keys, [filled(1, 1 << 20)] * 16)
            held.append(store.stats().num_bytes)
            held.append(contents.header.spare_bytes)

        interposed(monkeypatch, "map_in", fill)
        put(store, keys[0], 1, 1 << 20)
        _await_ahead(store)
        assert held == [16 << 20, 1 << 20]
        assert store.contains_prefix(keys) == 16
        assert contents.header.spare_bytes == 0
        assert contents.memory_bytes() == 16 << 20
        contents.check()


def test_no_memory_is_allocated_for_sizes_that_free_extents_serve(monkeypatch):
    """Free extents have memory for the one size of 1 MiB and for one of two sizes of 4 MiB."""
    needs_shared_memory(512 << 20)
    keys = random_keys(6)
    with opened() as (store, contents, _):
        arena = store._objects
        monkeypatch.setattr(store._ahead, "request", lambda: None)
        store.put(keys[:2], [filled(1, 1 << 20), filled(1, 4 << 20)])
        store.delete(keys[:2])
        spare = contents.extents(State.FREE)
        store.put(keys[3:], [filled(2, size << 20) for size in (8, 8, 8)])
        arena._sizes_ahead = [1 << 20, 4 << 20, 4 << 20]
        provided = []
        monkeypatch.setattr(arena, "_provide", lambda extent: provided.append(extent.room))
        arena.provide_ahead(threading.Event())
        assert provided == [4 << 20]
        assert all(extent.generation == 1 for extent in spare)


@pytest.mark.parametrize("freed_by", ["the next try", "a call", "close"])
def test_memory_allocated_while_the_lock_was_held_becomes_free_later(monkeypatch, freed_by):
    (key,) = random_keys(1)
    monkeypatch.setattr(memory_ahead, "_RETRY_S", 0.0 if freed_by == "the next try" else 30.0)
    with opened(timeout_s=0.2) as (_, contents, url), closing(open_store(url)) as other:
        held, has_failed, may_go_on = (threading.Event() for _ in range(3))
        store = open_store(url)
        arena = store._objects
        provide = arena.provide_ahead

        def hold():
            with other._objects._lock.locked():
                held.set()
                may_go_on.wait(30)

        holder = threading.Thread(target=hold)

        def hold_from_now_on():
            holder.start()
            assert held.wait(30)

        def provide_and_note(is_unwanted):
            try:
                provide(is_unwanted)
            except StoreUnavailableError:
                has_failed.set()
                raise

        interposed(monkeypatch, "map_in", hold_from_now_on)
        monkeypatch.setattr(arena, "provide_ahead", provide_and_note)
        put(store, key, 1, 1 << 20)
        assert has_failed.wait(30)
        assert contents.extents(State.AHEAD)
        may_go_on.set()
        holder.join()
        if freed_by == "the next try":
            _await_ahead(store)
        elif freed_by == "a call":
            assert store.contains_prefix([key]) == 1
        else:
            store.close()
        assert not contents.extents(State.AHEAD)
        assert contents.header.spare_bytes == 1 << 20
        assert contents.memory_bytes() == 2 << 20
        contents.check()
        store.close()


def test_puts_during_an_allocation_request_only_one_more(monkeypatch):
    requests, is_busy, may_go_on = [], threading.Event(), threading.Event()
    with opened() as (store, contents, _):

        def provide(is_unwanted):
            requests.append(1)
            is_busy.set()
            assert may_go_on.wait(30)

        monkeypatch.setattr(store._objects, "provide_ahead", provide)
        first, *others = random_keys(6)
        put(store, first, 1, 1 << 20)
        assert is_busy.wait(30)
        for key in others:
            put(store, key, 1, 1 << 20)
        may_go_on.set()
        _await_ahead(store)
        assert requests == [1, 1]
        assert contents.header.spare_bytes == 0


def test_memory_ahead_leaves_a_reserve_of_the_file_system_free(monkeypatch):
    first, second = random_keys(2)
    with opened() as (store, contents, _):
        for key, free_bytes, expected in ((first, 8 << 20, 0), (second, 9 << 20, 1 << 20)):
            free = property(lambda memory, free_bytes=free_bytes: free_bytes - 1)
            monkeypatch.setattr(mapped_memory.MappedMemory, "free_bytes", free)
            put(store, key, 1, 1 << 20)
            _await_ahead(store)
            assert contents.table.header.spare_bytes == expected


def test_small_objects_get_no_memory_ahead():
    (key,) = random_keys(1)
    with opened() as (store, contents, _):
        put(store, key, 1, 100_000)
        _await_ahead(store)
        assert contents.header.spare_bytes == 0


def test_a_store_closed_during_an_allocation_leaves_no_memory_ahead(monkeypatch):
    (key,) = random_keys(1)
    with opened() as (store, contents, url):
        other = open_store(url)
        interposed(monkeypatch, "map_in", other._objects.close)
        put(other, key, 1, 1 << 20)
        other.close()
        open_store(url).close()  # opening lists the extents
        assert not contents.extents(State.AHEAD)
        contents.check()
        assert read(store, key, 1 << 20) == filled(1, 1 << 20).to_bytes()


def test_a_closing_store_allocates_no_more_memory_ahead(monkeypatch):
    needs_shared_memory(128 << 20)
    provided = []
    with opened() as (_, contents, url):
        store = open_store(url)
        closer = threading.Thread(target=store.close)

        def close_meanwhile(memory, start, num_bytes):
            provided.append(num_bytes)
            closer.start()
            assert store._ahead._is_closing.wait(30)

        monkeypatch.setattr(mapped_memory.MappedMemory, "map_in", close_meanwhile)
        store.put(random_keys(3), [filled(1, 1 << 20)] * 3)
        _await_closed(store)
        closer.join()
        assert provided == [1 << 20]
        assert not contents.extents(State.AHEAD)
        assert contents.header.spare_bytes == 1 << 20
        contents.check()


@pytest.mark.parametrize("is_full", [False, True])
def test_both_lock_waits_of_an_allocation_share_one_deadline(monkeypatch, is_full):
    deadlines = []
    with opened() as (store, _, _):
        monkeypatch.setattr(store._ahead, "request", lambda: None)
        put(store, random_keys(1)[0], 1, 1 << 20)
        locked = files.FileLock.locked

        def note_and_lock(lock, deadline_s=None):
            deadlines.append(deadline_s)
            return locked(lock, deadline_s)

        monkeypatch.setattr(files.FileLock, "locked", note_and_lock)
        with refusing(monkeypatch, 1 if is_full else 2), suppress(OSError):
            store._objects.provide_ahead(threading.Event())
        assert len(deadlines) == 2
        assert deadlines[0] == deadlines[1] is not None


@pytest.mark.parametrize(
    ("error", "num_logged"),
    [(OSError("full"), 0), (StoreUnavailableError("locked"), 0), (ArithmeticError("a bug"), 1)],
)
def test_after_a_failure_not_every_put_requests_memory(monkeypatch, caplog, error, num_logged):
    requests, pauses, is_pausing, may_go_on = [], [], threading.Event(), threading.Event()
    with opened() as (store, _, _):

        def fail_once(is_unwanted):
            requests.append(1)
            if len(requests) == 1:
                raise error

        def pause(seconds):
            pauses.append(seconds)
            if seconds == memory_ahead._RETRY_S:
                is_pausing.set()
                assert may_go_on.wait(30)
            return store._ahead._is_closing.is_set()

        monkeypatch.setattr(store._objects, "provide_ahead", fail_once)
        monkeypatch.setattr(store._ahead._is_closing, "wait", pause)
        put(store, random_keys(1)[0], 1, 1 << 20)
        assert is_pausing.wait(30)
        for key in random_keys(5):
            put(store, key, 1, 1 << 20)
        assert len(requests) == 1
        assert pauses == [memory_ahead._PAUSE_S, memory_ahead._RETRY_S]
        may_go_on.set()
        _await_ahead(store)
        assert len(requests) == 2
        logged = [record for record in caplog.records if record.name == "baton.kvstore"]
        assert [record.exc_info[1] for record in logged] == [error] * num_logged


def test_memory_is_requested_again_after_no_thread_could_start(monkeypatch):
    *others, last = random_keys(9)
    requests = []
    with opened() as (store, contents, _):
        provide = store._objects.provide_ahead

        def note_and_provide(is_unwanted):
            requests.append(1)
            provide(is_unwanted)

        def refuse(*args):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(store._objects, "provide_ahead", note_and_provide)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for key in others:
                put(store, key, 1, 1 << 20)
        put(store, last, 1, 1 << 20)
        _await_ahead(store)
        assert requests == [1]
        assert contents.header.spare_bytes == 1 << 20


def test_a_put_into_full_memory_frees_spare_memory_first(monkeypatch):
    first, second = random_keys(2)
    with opened() as (store, contents, _):
        put(store, first, 1, 1 << 20)
        _await_ahead(store)
        monkeypatch.setattr(store._ahead, "request", lambda: None)
        [spare] = contents.extents(State.FREE)
        assert spare.resident_bytes == 1 << 20
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
        monkeypatch.setattr(store._ahead, "request", lambda: None)
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
        monkeypatch.setattr(store._ahead, "request", lambda: None)
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


@pytest.mark.parametrize("is_full", [False, True])
def test_memory_that_a_dead_process_allocated_ahead_is_freed(monkeypatch, is_full):
    keys = random_keys(40)
    with opened(max_bytes=32 << 20) as (store, contents, url):
        monkeypatch.setattr(store._ahead, "request", lambda: None)
        dying = open_store(url)
        arena = dying._objects
        with arena._locked():
            extents = [arena._space.reserve_ahead(1 << 20) for _ in range(3)]
        for extent in extents:
            arena._memory.provide(extent.offset, 1 << 20)
        dying.close()
        assert contents.memory_bytes() == 3 << 20
        if is_full:
            allocate = os.posix_fallocate

            def allocate_if_little_is_taken(fd, *args):
                if fd == store._objects._memory._fd and contents.memory_bytes() >= 3 << 20:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return allocate(fd, *args)

            monkeypatch.setattr(os, "posix_fallocate", allocate_if_little_is_taken)
            put(store, keys[0], 1, 1 << 20)
            assert contents.memory_bytes() == 1 << 20
        else:
            for key in keys:
                put(store, key, 1, 1 << 20)
                assert contents.memory_bytes() <= 32 << 20
        assert not contents.extents(State.AHEAD)
        contents.check()
