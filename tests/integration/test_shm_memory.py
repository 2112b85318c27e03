"""What the shm store takes of a machine's memory, full or not, and what goes when."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress

import pytest

from kvstore.conformance.objects import filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores import file_lock
from kvstore.stores.shm import arena_space, extent_table, mapped_memory
from kvstore.stores.shm import store as shm_store
from kvstore.stores.shm.extent_table import State
from tests.support.shm_arena import interposed, opened, put

_PAGE = 4096


def test_what_an_object_leaves_serves_the_next_of_its_size():
    old, other, new = random_keys(3)
    with opened() as (store, contents, _):
        put(store, old, 1, 5000)
        extent = contents.objects()[old]
        store.delete([old])
        put(store, other, 2, 9000)
        put(store, new, 3, 5001)
        assert contents.objects()[new].index == extent.index != contents.objects()[other].index
        assert read(store, new, 5001) == bytes(filled(3, 5001))
        assert read(store, old, 5000) is GetStatus.MISSING


class Clock:
    """Stands still but for touches, each of which is later than the one before."""

    def __init__(self):
        self.now_ns = 10**15

    def monotonic_ns(self):
        self.now_ns += 1
        return self.now_ns

    def wait(self, seconds):
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(arena_space, "time", clock)
    return clock


def test_memory_is_for_what_is_there(clock):
    keys = random_keys(40)
    with opened(max_bytes=100 * _PAGE) as (store, contents, _):
        for index, key in enumerate(keys):
            put(store, key, index, 10 * _PAGE)
            assert contents.memory_bytes() <= 100 * _PAGE
        assert len(contents.extents()) == 10
        assert [read(store, key, 10 * _PAGE) for key in keys[-10:]] == [
            bytes(filled(index, 10 * _PAGE)) for index in range(30, 40)
        ]
        clock.wait(5)
        store.delete(keys)
        assert contents.memory_bytes() == contents.header.spare_bytes == 10 * _PAGE
        put(store, keys[0], 1, 95 * _PAGE)
        assert contents.memory_bytes() == 95 * _PAGE


def test_memory_that_was_spare_stays_with_what_is_put_there(clock):
    kept, other = random_keys(2)
    with opened(max_bytes=100 * _PAGE) as (store, contents, _):
        put(store, kept, 1, 10 * _PAGE)
        store.delete([kept])
        put(store, kept, 2, 10 * _PAGE)
        put(store, other, 3, 20 * _PAGE)
        clock.wait(5)
        store.delete([other])  # more than may be spare
        assert contents.memory_bytes() == 10 * _PAGE
        assert read(store, kept, 10 * _PAGE) == bytes(filled(2, 10 * _PAGE))
        contents.check()


@contextmanager
def refusing(monkeypatch, num_calls):
    """No memory is to be had from the so many-th call on."""
    left, allocate = iter(range(num_calls)), os.posix_fallocate

    def allocate_or_refuse(*args):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allocate(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", allocate_or_refuse)
        yield


def test_full_memory_is_unavailable_and_leaves_nothing(monkeypatch):
    keys = random_keys(3)
    with opened() as (store, contents, _):
        put(store, keys[0], 1, 5000)
        with refusing(monkeypatch, 3), pytest.raises(StoreUnavailableError, match="No space left"):
            store.put_many(keys[1:], [filled(1, 9000)] * 2)
        assert store.contains_prefix(keys) == 1
        assert store.stats().num_bytes == contents.header.object_bytes == 5000
        contents.check()
        store.put_many(keys, [filled(1, 9000)] * 3)
        assert store.contains_prefix(keys) == 3


def test_a_put_that_finds_memory_full_takes_what_is_spare_first(monkeypatch):
    first, second = random_keys(2)
    with opened() as (store, contents, _):
        put(store, first, 1, 1 << 20)
        _await_ahead(store)
        monkeypatch.setattr(store, "_provide_ahead", lambda: None)
        [spare] = contents.extents(State.FREE)
        assert spare.resident_bytes == 1 << 20
        allocate = os.posix_fallocate

        def allocate_if_none_is_spare(fd, *args):
            if fd == store._objects._memory._fd and contents.header.spare_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return allocate(fd, *args)

        monkeypatch.setattr(os, "posix_fallocate", allocate_if_none_is_spare)
        put(store, second, 2, 2 << 20)
        assert read(store, second, 2 << 20) == bytes(filled(2, 2 << 20))
        assert spare.resident_bytes == 0
        assert contents.memory_bytes() == 3 << 20
        contents.check()


def _await_ahead(store):
    """Until what was to be made ready is, or was refused."""
    store._ahead.submit(lambda: None).result()


def _await_closed(store):
    """Until its thread has ended."""
    store._ahead.shutdown()


def _refuse_memory(patched):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "full")

    patched.setattr(os, "posix_fallocate", refuse)


def test_memory_is_made_ready_for_the_next_put(monkeypatch):
    first, second, third = random_keys(3)
    with opened() as (store, contents, _):
        put(store, first, 1, 1 << 20)
        _await_ahead(store)
        assert contents.header.spare_bytes == 1 << 20
        assert contents.memory_bytes() == 2 << 20
        contents.check()
        [spare] = contents.extents(State.FREE)
        with monkeypatch.context() as patched:
            _refuse_memory(patched)  # as it would be for any that is new
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
            assert read(store, key, 1 << 20) == bytes(filled(byte, 1 << 20))


def test_what_is_made_ready_evicts_nothing_and_keeps_the_bound(monkeypatch):
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


def test_what_is_being_made_ready_takes_no_room_of_objects(monkeypatch):
    keys, held = random_keys(16), []
    with opened(max_bytes=16 << 20, lease_s=600) as (store, contents, url):

        def fill():
            with closing(open_store(url)) as other:
                other.put_many(keys, [filled(1, 1 << 20)] * 16)
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


def test_what_is_ready_already_is_not_made_ready_again(monkeypatch):
    """Of two rooms: there is memory for all of the one and for one of two of the other."""
    keys = random_keys(6)
    with opened() as (store, contents, _):
        arena = store._objects
        monkeypatch.setattr(store, "_provide_ahead", lambda: None)
        store.put_many(keys[:2], [filled(1, 1 << 20), filled(1, 4 << 20)])
        store.delete(keys[:2])
        spare = contents.extents(State.FREE)
        store.put_many(keys[3:], [filled(2, size << 20) for size in (8, 8, 8)])
        arena._sizes_ahead = [1 << 20, 4 << 20, 4 << 20]
        provided = []
        monkeypatch.setattr(arena, "_provide", lambda extent: provided.append(extent.room))
        arena.provide_ahead(threading.Event())
        assert provided == [4 << 20]
        assert all(extent.generation == 1 for extent in spare)


def test_what_was_made_ready_while_the_lock_was_kept_is_free_at_the_next_call(monkeypatch):
    (key,) = random_keys(1)
    with opened(timeout_s=0.2) as (store, contents, url), closing(open_store(url)) as other:
        held, may_go_on = threading.Event(), threading.Event()

        def hold():
            with other._objects._lock.locked():
                held.set()
                may_go_on.wait(30)

        holder = threading.Thread(target=hold)

        def hold_from_now_on():
            holder.start()
            assert held.wait(30)

        interposed(monkeypatch, "map_in", hold_from_now_on)
        put(store, key, 1, 1 << 20)
        _await_ahead(store)
        may_go_on.set()
        holder.join()
        assert contents.extents(State.AHEAD)
        assert store.stats().num_bytes == 1 << 20
        assert store.contains_prefix([key]) == 1
        assert not contents.extents(State.AHEAD)
        assert contents.header.spare_bytes == 1 << 20
        assert contents.memory_bytes() == 2 << 20
        contents.check()


def test_many_puts_ask_for_memory_once(monkeypatch):
    asked, may_go_on = [], threading.Event()
    with opened() as (store, contents, _):
        store._ahead.submit(may_go_on.wait, 30)
        monkeypatch.setattr(store, "_provide_ahead", lambda: asked.append(1))
        for key in random_keys(5):
            put(store, key, 1, 1 << 20)
        may_go_on.set()
        _await_ahead(store)
        assert asked == [1]
        assert contents.header.spare_bytes == 0


def test_what_others_may_need_of_a_file_system_is_left_to_them(monkeypatch):
    first, second = random_keys(2)
    with opened() as (store, contents, _):
        for key, free_bytes, expected in ((first, 8 << 20, 0), (second, 9 << 20, 1 << 20)):
            free = property(lambda memory, free_bytes=free_bytes: free_bytes - 1)
            monkeypatch.setattr(mapped_memory.MappedMemory, "free_bytes", free)
            put(store, key, 1, 1 << 20)
            _await_ahead(store)
            assert contents.table.header.spare_bytes == expected


def test_changes_are_told_in_the_order_of_the_last_ones():
    keys = random_keys(3)
    with opened() as (store, contents, _):
        for key in keys:
            put(store, key, 1, 5000)
        num_seen = contents.table.header.num_changes
        for key in (keys[1], keys[2], keys[0]):
            store.delete([key])
        put(store, keys[2], 1, 5000)  # where the last one was
        changed = [extent.index for extent in contents.table.changes_since(num_seen)]
        assert changed == [1, 2, 0]


def test_little_is_not_worth_memory_ahead():
    (key,) = random_keys(1)
    with opened() as (store, contents, _):
        put(store, key, 1, 100_000)
        _await_ahead(store)
        assert contents.header.spare_bytes == 0


def test_a_store_that_is_closed_while_memory_is_made_ready_leaves_nothing(monkeypatch):
    (key,) = random_keys(1)
    with opened() as (store, contents, url):
        other = open_store(url)
        interposed(monkeypatch, "map_in", other._objects.close)
        put(other, key, 1, 1 << 20)
        other.close()
        open_store(url).close()  # lists
        assert not contents.extents(State.AHEAD)
        contents.check()
        assert read(store, key, 1 << 20) == bytes(filled(1, 1 << 20))


def test_a_store_that_is_closed_makes_no_more_ready(monkeypatch):
    provided = []
    with opened() as (_, contents, url):
        store = open_store(url)
        closer = threading.Thread(target=store.close)

        def close_meanwhile(memory, start, num_bytes):
            provided.append(num_bytes)
            closer.start()
            assert store._is_closing.wait(30)

        monkeypatch.setattr(mapped_memory.MappedMemory, "map_in", close_meanwhile)
        store.put_many(random_keys(3), [filled(1, 1 << 20)] * 3)
        _await_closed(store)
        closer.join()
        assert provided == [1 << 20]
        assert not contents.extents(State.AHEAD)
        assert contents.header.spare_bytes == 1 << 20
        contents.check()


@pytest.mark.parametrize("is_full", [False, True])
def test_memory_ahead_waits_for_the_lock_until_one_deadline(monkeypatch, is_full):
    deadlines = []
    with opened() as (store, _, _):
        monkeypatch.setattr(store, "_provide_ahead", lambda: None)
        put(store, random_keys(1)[0], 1, 1 << 20)
        locked = file_lock.FileLock.locked

        def note_and_lock(lock, deadline_s=None):
            deadlines.append(deadline_s)
            return locked(lock, deadline_s)

        monkeypatch.setattr(file_lock.FileLock, "locked", note_and_lock)
        with refusing(monkeypatch, 1 if is_full else 2), suppress(OSError):
            store._objects.provide_ahead(threading.Event())
        assert len(deadlines) == 2
        assert deadlines[0] == deadlines[1] is not None


@pytest.mark.parametrize(
    ("error", "num_logged"),
    [(OSError("full"), 0), (StoreUnavailableError("locked"), 0), (ArithmeticError("a bug"), 1)],
)
def test_after_a_failure_memory_is_not_asked_for_with_each_put(
    monkeypatch, caplog, error, num_logged
):
    asked, pauses, may_go_on = [], [], threading.Event()
    with opened() as (store, _, _):

        def fail(is_unwanted):
            asked.append(1)
            raise error

        def pause(seconds):
            pauses.append(seconds)
            return bool(seconds == shm_store._AHEAD_RETRY_S and may_go_on.wait(30))

        monkeypatch.setattr(store._objects, "provide_ahead", fail)
        monkeypatch.setattr(store._is_closing, "wait", pause)
        put(store, random_keys(1)[0], 1, 1 << 20)
        while len(pauses) < 2:
            time.sleep(0.001)
        for key in random_keys(5):
            put(store, key, 1, 1 << 20)
        assert len(asked) == 1
        assert pauses == [shm_store._AHEAD_PAUSE_S, shm_store._AHEAD_RETRY_S]
        may_go_on.set()
        _await_ahead(store)
        assert len(asked) == 2
        logged = [record for record in caplog.records if record.name == "baton.kvstore"]
        assert [record.exc_info[1] for record in logged[:num_logged]] == [error] * num_logged
        assert len(logged) == 2 * num_logged


def test_memory_is_asked_for_again_when_no_thread_was_to_be_had(monkeypatch):
    first, second = random_keys(2)
    with opened() as (store, contents, _):

        def refuse(*args):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(store._ahead, "submit", refuse)
            put(store, first, 1, 1 << 20)
        put(store, second, 1, 1 << 20)
        _await_ahead(store)
        assert contents.header.spare_bytes == 1 << 20


def test_what_may_still_be_read_keeps_its_memory(clock, monkeypatch):
    (key,) = random_keys(1)
    with opened(max_bytes=100 * _PAGE) as (store, contents, url), closing(open_store(url)) as other:
        put(store, key, 1, 90 * _PAGE)
        found = []

        def delete():
            found.append(contents.memory_bytes())
            other.delete([key])
            found.append(contents.memory_bytes())

        interposed(monkeypatch, "read", delete)
        assert read(store, key, 90 * _PAGE) is GetStatus.MISSING
        assert found == [90 * _PAGE] * 2
        clock.wait(5)
        assert store.contains_prefix([key]) == 0
        assert contents.memory_bytes() == 0


def test_time_that_passes_in_a_listing_frees_nothing_twice(clock, monkeypatch):
    keys = random_keys(8)
    with opened(max_bytes=8 * _PAGE, ttl_s=1) as (first, contents, url):
        for key in keys:
            put(first, key, 1, _PAGE)
            clock.wait(0.1)
        clock.wait(0.45)
        ticks = clock.monotonic_ns

        def tick():
            clock.wait(0.05)
            return ticks()

        monkeypatch.setattr(clock, "monotonic_ns", tick)
        with closing(open_store(url)) as store:
            monkeypatch.setattr(clock, "monotonic_ns", ticks)
            seen = list(store._objects._space._by_age)
            assert seen
            assert all(contents.table[one.extent_index].state == State.OBJECT for one in seen)
        contents.check()


def test_the_table_has_memory_before_it_is_written_to(monkeypatch):
    """Who wrote where none is to be had would be killed."""
    with opened() as (store, contents, _):

        def table_bytes():
            return (contents.folder / "table").stat().st_blocks * 512

        header_bytes = table_bytes()
        for key in random_keys(100):
            with refusing(monkeypatch, 0), pytest.raises(StoreUnavailableError, match="No space"):
                put(store, key, 1, 100)
        assert table_bytes() == header_bytes >= 8 * extent_table._RING
        assert not contents.extents()
        store.put_many(random_keys(100), [filled(1, 100)] * 100)
        assert header_bytes < table_bytes() <= header_bytes + 3 * _PAGE


_FILL_AND_GO_ON = """
import sys
from pathlib import Path
from kvstore.conformance.objects import filled, random_keys
from kvstore.registry import open_store
from kvstore.store import StoreUnavailableError
from kvstore.stores.shm import store as shm_store

shm_store._SHARED_MEMORY = Path(sys.argv[1])
store, reader = (open_store("shm://full?max_bytes=1GiB&lease_s=0") for _ in range(2))
taken = []
for key in random_keys(2000):
    try:
        store.put_many([key], [filled(1, 30_000)])
        taken.append(key)
    except StoreUnavailableError:
        assert taken
with (Path(sys.argv[1]) / "other").open("wb", buffering=0) as other:
    try:
        while other.write(bytes(4096)):
            pass
    except OSError:
        pass
assert len(taken) > 100
assert reader.contains_prefix(taken) == len(taken)
assert reader.get_many_into(taken, [memoryview(bytearray(30_000))] * len(taken)) == [0] * len(taken)
assert reader.delete(taken) == len(taken)
store.put_many(taken[:9], [filled(1, 30_000)] * 9)
print("survived")
"""


def test_full_memory_kills_nobody(tmp_path):
    """In a file system of 8 MB: whoever touches a mapped page that cannot be had is killed."""
    enter = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"], check=False).returncode:
        pytest.skip("no namespace of mounts can be made")
    mount = 'mount -t tmpfs -o size=8m tmpfs "$1" && exec "$0" -c "$2" "$1"'
    command = [*enter, "sh", "-c", mount, sys.executable, tmp_path, _FILL_AND_GO_ON]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


def test_a_failed_put_hinders_nobody(monkeypatch):
    keys = random_keys(2)
    with opened(max_bytes=10_000) as (store, contents, url), closing(open_store(url)) as other:
        with refusing(monkeypatch, 1), pytest.raises(StoreUnavailableError, match="No space"):
            put(store, keys[0], 1, 9000)
        put(other, keys[1], 1, 9000)
        contents.check()


def test_what_a_dead_writer_had_gives_all_its_memory_back(clock):
    """Also what the object before it left, which was larger."""
    with opened() as (store, contents, url):
        (key,) = random_keys(1)
        put(store, key, 1, 48 * _PAGE)
        store.delete([key])
        arena = store._objects
        with arena._locked():
            extent = arena._space.reserve(45 * _PAGE)
        assert extent.resident_bytes == 48 * _PAGE
        extent.writer = 12345
        open_store(url).close()  # lists
        assert contents.memory_bytes() == 48 * _PAGE, "what lay there may still be read"
        clock.wait(5)
        open_store(url).close()
        assert contents.memory_bytes() == store.stats().num_bytes == 0
        contents.check()


def test_memory_grows_under_who_has_mapped_it(monkeypatch):
    monkeypatch.setattr(mapped_memory, "_FIRST_BYTES", _PAGE)
    keys = random_keys(30)
    with opened() as (store, contents, url), closing(open_store(url)) as other:
        for number, key in enumerate(keys):
            put((store, other)[number % 2], key, number, 5000 + number)
        for number, key in enumerate(keys):
            for reader in (store, other):
                assert read(reader, key, 5000 + number) == bytes(filled(number, 5000 + number))
        contents.check()


def test_a_full_table_is_unavailable(monkeypatch):
    keys = random_keys(3)
    with opened() as (store, contents, _):
        monkeypatch.setattr(extent_table, "_MAX_EXTENTS", 2)
        store.put_many(keys[:2], [filled(1, 100)] * 2)
        with pytest.raises(StoreUnavailableError, match="as many extents"):
            put(store, keys[2], 1, 100)
        store.delete(keys[:1])
        put(store, keys[2], 1, 100)
        assert store.contains_prefix(keys[1:]) == 2
        contents.check()


def test_stats_tell_what_went_and_the_age_that_the_last_listing_saw(clock):
    keys = random_keys(10)
    with opened(ttl_s=600, max_bytes=900) as (first, contents, url):
        assert first.stats().oldest_age_s is None
        for key, wait_s in zip(keys, (100, 400, 100, 100, 100, 10, 10, 10, 10, 60), strict=True):
            put(first, key, 1, 90)
            clock.wait(wait_s)
        assert first.stats().num_bytes == 900
        with closing(open_store(url)) as store:
            stats = store.stats()
            assert (stats.evictions, stats.expirations) == (0, 2)
            assert stats.num_bytes == contents.header.object_bytes == 720
            assert stats.oldest_age_s == pytest.approx(400)
            put(store, random_keys(1)[0], 1, 200)
            stats = store.stats()
            assert (stats.evictions, stats.expirations) == (1, 2)
            assert stats.oldest_age_s == pytest.approx(300)


def test_a_leased_object_stays_until_its_lease_is_over(clock):
    keys = random_keys(11)
    with opened(max_bytes=1000, lease_s=600) as (store, contents, _):
        store.put_many(keys[:10], [filled(1, 100)] * 10)
        clock.wait(599)
        with pytest.raises(StoreUnavailableError, match="full of leased objects"):
            put(store, keys[10], 1, 100)
        assert len(contents.objects()) == 10
        clock.wait(2)
        put(store, keys[10], 1, 100)
        assert set(keys) - contents.objects().keys() == {keys[0]}


def test_the_default_bound_is_half_of_the_free_memory(monkeypatch):
    """Free memory counts what the store holds itself, so that every opener finds one bound."""
    with opened() as (_, contents, url):

        def disk_usage(path):
            in_use = contents.memory_bytes()
            return shutil._ntuple_diskusage(200 * _PAGE, in_use, 200 * _PAGE - in_use)

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
        for _ in range(3):
            with closing(open_store(url)) as store:
                store.put_many(random_keys(50), [filled(1, 3 * _PAGE)] * 50)
                assert 90 * _PAGE < contents.header.object_bytes <= 100 * _PAGE
