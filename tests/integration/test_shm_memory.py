"""What the shm store takes of a machine's memory, full or not, and what goes when."""

import shutil
import subprocess
import sys
from contextlib import closing

import pytest

from kvstore.conformance.objects import filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores.shm import arena_space, extent_table, mapped_memory
from kvstore.stores.shm.extent_table import State
from tests.support.shm_arena import interposed, opened, put, refusing

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
        assert read(store, new, 5001) == filled(3, 5001).to_bytes()
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
            filled(index, 10 * _PAGE).to_bytes() for index in range(30, 40)
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
        assert read(store, kept, 10 * _PAGE) == filled(2, 10 * _PAGE).to_bytes()
        contents.check()


def test_full_memory_is_unavailable_and_leaves_nothing(monkeypatch):
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
        store.put(random_keys(100), [filled(1, 100)] * 100)
        assert header_bytes < table_bytes() <= header_bytes + 3 * _PAGE


_FILL_AND_GO_ON = """
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


_LIVE_IN_A_CONTAINER = """
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
assert alive == keys[-len(alive):], "a younger one went before an older one"
assert 24 <= len(alive) <= 32, len(alive)
assert read(store, keys[-1], 1 << 20) == filled(99, 1 << 20).to_bytes()
print("survived")
"""


def run_in_memory_of(size, tmp_path, program):
    """Runs a program that gets a folder of that size; skips where none can be mounted."""
    enter = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"], check=False).returncode:
        pytest.skip("no namespace of mounts can be made")
    mount = f'mount -t tmpfs -o size={size} tmpfs "$1" && exec "$0" -c "$2" "$1"'
    command = [*enter, "sh", "-c", mount, sys.executable, tmp_path, program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_full_memory_kills_nobody(tmp_path):
    """In a file system of 8 MB: whoever touches a mapped page that cannot be had is killed."""
    done = run_in_memory_of("8m", tmp_path, _FILL_AND_GO_ON)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


def test_a_container_with_dockers_default_has_a_store_of_half_of_it(tmp_path):
    done = run_in_memory_of("64m", tmp_path, _LIVE_IN_A_CONTAINER)
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
                assert read(reader, key, 5000 + number) == filled(number, 5000 + number).to_bytes()
        contents.check()


def test_a_full_table_is_unavailable(monkeypatch):
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
        store.put(keys[:10], [filled(1, 100)] * 10)
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
                store.put(random_keys(50), [filled(1, 3 * _PAGE)] * 50)
                assert 90 * _PAGE < contents.header.object_bytes <= 100 * _PAGE
