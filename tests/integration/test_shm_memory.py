"""The shm store's memory use, whether memory is full or not, and its evictions."""

import fcntl
import shutil
import subprocess
import sys
from contextlib import closing

import pytest

from kvstore.conformance.objects import filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreFullError, StoreUnavailableError
from kvstore.stores.shm import arena_space, extent_table, mapped_memory
from kvstore.stores.shm.extent_table import State
from tests.support.shm_arena import interposed, opened, put, refusing

_PAGE = 4096


def test_a_deleted_objects_extent_serves_the_next_object_of_its_size():
    old, other, new = random_keys(3)
    with opened() as (store, contents, _):
        put(store, old, 1, 5000)
        extent = contents.objects()[old]
        store.delete([old])
        put(store, other, 2, 9000)
        put(store, new, 3, 5001)
        assert contents.objects()[new].index == extent.index != contents.objects()[other].index
        assert read(store, new, 5001) == filled(3, 5001).to_bytes()
        assert read(store, old, 5000) is GetStatus.MISSING


class Clock:
    """A clock that only `wait` advances, apart from one nanosecond for each reading."""

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


def test_memory_in_use_is_bounded_and_shrinks_after_deletes(clock):
    keys = random_keys(40)
    with opened(max_bytes=100 * _PAGE) as (store, contents, _):
        for index, key in enumerate(keys):
            put(store, key, index, 10 * _PAGE)
            assert contents.memory_bytes() <= 100 * _PAGE
        assert len(contents.extents()) == 10
        assert [read(store, key, 10 * _PAGE) for key in keys[-10:]] == [
            filled(index, 10 * _PAGE).to_bytes() for index in range(30, 40)
        ]
        clock.wait(5)
        store.delete(keys)
        assert contents.memory_bytes() == contents.header.spare_bytes == 10 * _PAGE
        put(store, keys[0], 1, 95 * _PAGE)
        assert contents.memory_bytes() == 95 * _PAGE


def test_an_object_put_into_spare_memory_keeps_that_memory(clock):
    kept, other = random_keys(2)
    with opened(max_bytes=100 * _PAGE) as (store, contents, _):
        put(store, kept, 1, 10 * _PAGE)
        store.delete([kept])
        put(store, kept, 2, 10 * _PAGE)
        put(store, other, 3, 20 * _PAGE)
        clock.wait(5)
        store.delete([other])  # larger than the limit of spare memory
        assert contents.memory_bytes() == 10 * _PAGE
        assert read(store, kept, 10 * _PAGE) == filled(2, 10 * _PAGE).to_bytes()
        contents.check()


def test_a_put_into_full_memory_fails_and_leaves_nothing(monkeypatch):
    keys = random_keys(3)
    with opened() as (store, contents, _):
        put(store, keys[0], 1, 5000)
        with refusing(monkeypatch, 3), pytest.raises(StoreUnavailableError, match="No space left"):
            store.put(keys[1:], [filled(1, 9000)] * 2)
        assert store.contains_prefix(keys) == 1
        assert store.stats().num_bytes == contents.header.object_bytes == 5000
        contents.check()
        store.put(keys, [filled(1, 9000)] * 3)
        assert store.contains_prefix(keys) == 3


def test_changes_are_listed_in_the_order_of_each_extents_last_change():
    keys = random_keys(3)
    with opened() as (store, contents, _):
        for key in keys:
            put(store, key, 1, 5000)
        num_seen = contents.table.header.num_changes
        for key in (keys[1], keys[2], keys[0]):
            store.delete([key])
        put(store, keys[2], 1, 5000)  # reuses the extent that was freed last
        changed = [extent.index for extent in contents.table.changes_since(num_seen)]
        assert changed == [1, 2, 0]


def test_a_deleted_object_keeps_its_memory_while_it_may_be_read(clock, monkeypatch):
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


def test_objects_that_expire_during_a_listing_are_freed_once(clock, monkeypatch):
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


def test_the_table_is_allocated_before_it_is_written(monkeypatch):
    """Writing an unallocated page of a full /dev/shm would raise SIGBUS."""
    with opened() as (store, contents, _):

        def table_bytes():
            return (contents.folder / "table").stat().st_blocks * 512

        header_bytes = table_bytes()
        for key in random_keys(100):
            with refusing(monkeypatch, 0), pytest.raises(StoreUnavailableError, match="No space"):
                put(store, key, 1, 100)
        assert table_bytes() == header_bytes >= 8 * extent_table._RING
        assert not contents.extents()
        store.put(random_keys(100), [filled(1, 100)] * 100)
        assert header_bytes < table_bytes() <= header_bytes + 3 * _PAGE


_FILL_AND_CONTINUE = """
import sys
from pathlib import Path
from kvstore.conformance.objects import blank, filled, random_keys
from kvstore.registry import open_store
from kvstore.store import StoreUnavailableError
from kvstore.stores.shm import store as shm_store

shm_store._SHARED_MEMORY = Path(sys.argv[1])
store, reader = (open_store("shm://full?max_bytes=1GiB&lease_s=0") for _ in range(2))
taken = []
for key in random_keys(2000):
    try:
        store.put([key], [filled(1, 30_000)])
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
assert reader.get_into(taken, [blank(30_000)] * len(taken)) == [0] * len(taken)
assert reader.delete(taken) == len(taken)
store.put(taken[:9], [filled(1, 30_000)] * 9)
print("survived")
"""


_FILL_A_SMALL_STORE = """
import sys
from pathlib import Path
from kvstore.conformance.objects import filled, random_keys, read
from kvstore.registry import open_store
from kvstore.stores.shm import store as shm_store

shm_store._SHARED_MEMORY = Path(sys.argv[1])
store = open_store("shm://small?lease_s=0")
keys = random_keys(100)
for number, key in enumerate(keys):
    store.put([key], [filled(number, 1 << 20)])
alive = [key for key in keys if store.contains_prefix([key])]
assert alive == keys[-len(alive):], "a younger object was evicted before an older one"
assert 24 <= len(alive) <= 32, len(alive)
assert read(store, keys[-1], 1 << 20) == filled(99, 1 << 20).to_bytes()
print("survived")
"""


def run_in_tmpfs(size, tmp_path, program):
    """Runs a program with a tmpfs of that size; skips the test if none can be mounted."""
    enter = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"], check=False).returncode:
        pytest.skip("no mount namespace can be created")
    mount = f'mount -t tmpfs -o size={size} tmpfs "$1" && exec "$0" -c "$2" "$1"'
    command = [*enter, "sh", "-c", mount, sys.executable, tmp_path, program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_process_survives_full_memory(tmp_path):
    """In a tmpfs of 8 MB, touching a mapped page that cannot be allocated raises SIGBUS."""
    done = run_in_tmpfs("8m", tmp_path, _FILL_AND_CONTINUE)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


def test_the_default_store_takes_half_of_dockers_default_memory(tmp_path):
    done = run_in_tmpfs("64m", tmp_path, _FILL_A_SMALL_STORE)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


def test_a_failed_put_leaves_its_room_to_other_puts(monkeypatch):
    keys = random_keys(2)
    with opened(max_bytes=10_000) as (store, contents, url), closing(open_store(url)) as other:
        with refusing(monkeypatch, 1), pytest.raises(StoreUnavailableError, match="No space"):
            put(store, keys[0], 1, 9000)
        put(other, keys[1], 1, 9000)
        contents.check()


@pytest.mark.parametrize("freed_by", ["a call", "close"])
def test_room_of_a_put_that_lost_the_lock_becomes_free_later(monkeypatch, freed_by):
    (key,) = random_keys(1)
    with opened(timeout_s=0.1) as (_, contents, url), closing(open_store(url)) as store:
        with (contents.folder / "lock").open("rb") as lock:
            interposed(monkeypatch, "write", lambda: fcntl.flock(lock, fcntl.LOCK_EX))
            with pytest.raises(StoreUnavailableError, match="lock was not free"):
                put(store, key, 1, 5000)
        assert contents.extents(State.WRITTEN_TO)
        if freed_by == "a call":
            assert store.contains_prefix([key]) == 0
        else:
            store.close()
        assert not contents.extents(State.WRITTEN_TO)
        assert contents.header.object_bytes == 0
        contents.check()


def test_all_memory_of_a_dead_writers_extent_is_freed(clock):
    """The extent also has memory left from an earlier, larger object."""
    with opened() as (store, contents, url):
        (key,) = random_keys(1)
        put(store, key, 1, 48 * _PAGE)
        store.delete([key])
        arena = store._objects
        with arena._locked():
            extent = arena._space.reserve(45 * _PAGE)
        assert extent.resident_bytes == 48 * _PAGE
        extent.writer = 12345
        open_store(url).close()  # opening lists the extents
        assert contents.memory_bytes() == 48 * _PAGE, "the earlier object may still be read"
        clock.wait(5)
        open_store(url).close()
        assert contents.memory_bytes() == store.stats().num_bytes == 0
        contents.check()


def test_the_memory_file_grows_while_stores_have_it_mapped(monkeypatch):
    monkeypatch.setattr(mapped_memory, "_FIRST_BYTES", _PAGE)
    keys = random_keys(30)
    with opened() as (store, contents, url), closing(open_store(url)) as other:
        for number, key in enumerate(keys):
            put((store, other)[number % 2], key, number, 5000 + number)
        for number, key in enumerate(keys):
            for reader in (store, other):
                assert read(reader, key, 5000 + number) == filled(number, 5000 + number).to_bytes()
        contents.check()


def test_a_put_into_a_full_table_fails(monkeypatch):
    keys = random_keys(3)
    with opened() as (store, contents, _):
        monkeypatch.setattr(extent_table, "_MAX_EXTENTS", 2)
        store.put(keys[:2], [filled(1, 100)] * 2)
        with pytest.raises(StoreUnavailableError, match="as many extents"):
            put(store, keys[2], 1, 100)
        store.delete(keys[:1])
        put(store, keys[2], 1, 100)
        assert store.contains_prefix(keys[1:]) == 2
        contents.check()


def test_stats_count_removals_and_the_oldest_age_at_the_last_listing(clock):
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


def test_a_leased_object_is_kept_until_its_lease_ends(clock):
    keys = random_keys(11)
    with opened(max_bytes=1000, lease_s=600) as (store, contents, _):
        store.put(keys[:10], [filled(1, 100)] * 10)
        clock.wait(599)
        with pytest.raises(StoreFullError, match="full of leased objects"):
            put(store, keys[10], 1, 100)
        assert len(contents.objects()) == 10
        clock.wait(2)
        put(store, keys[10], 1, 100)
        assert set(keys) - contents.objects().keys() == {keys[0]}


def test_the_default_bound_is_half_of_the_free_memory(monkeypatch):
    """Free memory includes what the store itself holds, so every opener finds the same bound."""
    with opened() as (_, contents, url):

        def disk_usage(path):
            in_use = contents.memory_bytes()
            return shutil._ntuple_diskusage(200 * _PAGE, in_use, 200 * _PAGE - in_use)

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
        for _ in range(3):
            with closing(open_store(url)) as store:
                store.put(random_keys(50), [filled(1, 3 * _PAGE)] * 50)
                assert 90 * _PAGE < contents.header.object_bytes <= 100 * _PAGE
