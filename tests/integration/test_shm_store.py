"""The shm store under what other processes, crashes and users do to its memory."""

import errno
import fcntl
import multiprocessing
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import uuid
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from baton.errors import ConfigurationError
from kvstore.conformance.objects import blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores.shm import arena_space, extent_table, mapped_memory
from kvstore.stores.shm import store as shm_store
from kvstore.stores.shm.extent_table import State
from kvstore.stores.shm.mapped_memory import MappedMemory
from kvstore.stores.shm.writers import Writers
from tests.support.shm_arena import ArenaContents

_SPAWN = multiprocessing.get_context("spawn")
_PAGE = 4096
_DEADLINE_S = 30


@contextmanager
def opened(**options):
    """A store, what lies in its memory, and its URL."""
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


def put(store, key, byte, num_bytes):
    store.put_many([key], [filled(byte, num_bytes)])


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
        assert contents.memory_bytes() == contents.table.spare_bytes == 10 * _PAGE
        put(store, keys[0], 1, 95 * _PAGE)
        assert contents.memory_bytes() == 95 * _PAGE


def interposed(monkeypatch, name, act):
    """Has something done once, in the midst of a call of `MappedMemory`."""
    call = getattr(MappedMemory, name)
    todo = [act]

    def act_and_call(*args):
        if todo:
            todo.pop()()
        return call(*args)

    monkeypatch.setattr(MappedMemory, name, act_and_call)


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


def test_what_goes_while_it_is_read_is_missing(monkeypatch):
    old, new = random_keys(2)
    with opened() as (store, contents, url), closing(open_store(url)) as other:
        put(store, old, 1, 5000)
        index = contents.objects()[old].index

        def replace():
            other.delete([old])
            put(other, new, 2, 5000)

        interposed(monkeypatch, "read", replace)
        frame = blank(64), blank(4936)
        assert store.get_frames_into([old], [frame]) == [GetStatus.MISSING]
        assert contents.objects()[new].index == index
        assert read(store, new, 5000) == bytes(filled(2, 5000))


def test_what_comes_back_while_it_is_read_is_another(monkeypatch):
    (key,) = random_keys(1)
    with opened() as (store, _, url), closing(open_store(url)) as other:
        put(store, key, 1, 5000)

        def replace():
            other.delete([key])
            put(other, key, 2, 5000)

        interposed(monkeypatch, "read", replace)
        assert read(store, key, 5000) is GetStatus.MISSING
        assert read(store, key, 5000) == bytes(filled(2, 5000))


def test_who_was_first_wins(monkeypatch):
    (key,) = random_keys(1)
    with opened() as (store, contents, url), closing(open_store(url)) as other:
        interposed(monkeypatch, "write", lambda: put(other, key, 2, 5000))
        put(store, key, 1, 5000)
        assert read(store, key, 5000) == bytes(filled(2, 5000))
        assert [extent.state for extent in contents.extents()].count(State.FREE) == 1
        contents.check()


def test_one_key_twice_in_a_batch_is_one_object():
    (key,) = random_keys(1)
    with opened() as (store, contents, _):
        store.put_many([key, key], [filled(1, 5000), filled(2, 5000)])
        assert read(store, key, 5000) == bytes(filled(1, 5000))
        contents.check()


def test_full_memory_is_unavailable_and_leaves_nothing(monkeypatch):
    keys = random_keys(3)
    with opened() as (store, contents, _):
        put(store, keys[0], 1, 5000)
        with refusing(monkeypatch, 3), pytest.raises(StoreUnavailableError, match="No space left"):
            store.put_many(keys[1:], [filled(1, 9000)] * 2)
        assert store.contains_prefix(keys) == 1
        assert store.stats().num_bytes == contents.table.object_bytes == 5000
        contents.check()
        store.put_many(keys, [filled(1, 9000)] * 3)
        assert store.contains_prefix(keys) == 3


def test_a_held_lock_is_unavailable_in_time():
    keys = random_keys(2)
    with opened(timeout_s=0.1) as (store, contents, _):
        put(store, keys[0], 1, 100)
        calls = [
            lambda: put(store, keys[1], 1, 100),
            lambda: read(store, keys[0], 100),
            lambda: store.contains_prefix(keys),
            lambda: store.delete(keys),
        ]
        with (contents.folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for call in calls:
                with pytest.raises(StoreUnavailableError, match="lock was not free"):
                    call()
        put(store, keys[1], 1, 100)
        assert store.contains_prefix(keys) == 2


def test_a_folder_that_vanished_is_unavailable():
    with opened() as (store, contents, url):
        keys = random_keys(1)
        put(store, keys[0], 1, 100)
        shutil.rmtree(contents.folder)
        with pytest.raises(StoreUnavailableError, match="removed"):
            put(store, keys[0], 1, 100)
        with pytest.raises(StoreUnavailableError, match="removed"):
            store.contains_prefix(keys)
        with closing(open_store(url)) as new:
            assert new.contains_prefix(keys) == 0


@pytest.mark.parametrize("spoil", ["length", "format"])
def test_the_table_of_another_version_is_refused(spoil):
    with opened() as (store, contents, url):
        if spoil == "length":
            os.truncate(contents.folder / "table", 1000)
        else:
            contents.table.cells[0] += 1
        with pytest.raises(ConfigurationError, match="another version of Baton made it"):
            open_store(url)
        assert store.stats().num_bytes == 0 or spoil == "length"


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


def test_who_is_about_to_close_begins_nothing(monkeypatch):
    """Without a mark, others would take its extent for a dead writer's."""
    (key,) = random_keys(1)
    close, refused = Writers.close, []

    def close_and_put(writers):
        close(writers)
        with pytest.raises(StoreUnavailableError, match="closed"):
            put(store, key, 1, 100)
        refused.append(key)

    with opened() as (_, contents, url):
        monkeypatch.setattr(Writers, "close", close_and_put)
        store = open_store(url)
        store.close()
        assert refused
        assert not contents.extents()


def test_a_closed_store_is_unavailable():
    (key,) = random_keys(1)
    with opened() as (_, _, url):
        store = open_store(url)
        store.close()
        store.close()
        calls = [
            lambda: put(store, key, 1, 100),
            lambda: read(store, key, 100),
            lambda: store.contains_prefix([key]),
            lambda: store.delete([key]),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailableError, match="closed"):
                call()


def test_a_store_that_is_closed_while_it_is_read_gives_nothing(monkeypatch):
    """Without a file, memory that is mapped is nobody's, and zeros."""
    (key,) = random_keys(1)
    with opened() as (store, _, url):
        put(store, key, 1, 5000)
        reader, status = open_store(url), os.fstat
        memory = reader._objects._memory
        closers = []

        def close_after(fd):
            found = status(fd)
            if fd == memory._fd and not closers:
                closers.append(threading.Thread(target=reader.close))
                closers[0].start()
                closers[0].join(0.2)  # until it is over, or waits
            return found

        monkeypatch.setattr(os, "fstat", close_after)
        try:
            value = read(reader, key, 5000)
        except StoreUnavailableError:
            value = None
        closers[0].join()
        assert value in (None, bytes(filled(1, 5000)))


def test_a_mark_that_goes_while_others_list_is_none(monkeypatch):
    with opened() as (_, _, url):
        look = Path.iterdir

        def look_at_one_more(path):
            yield from look(path)
            yield path / f"{1:016x}"

        monkeypatch.setattr(Path, "iterdir", look_at_one_more)
        with closing(open_store(url)) as store:
            assert 1 not in store._objects._writers.living()
            assert store._objects._writers.own in store._objects._writers.living()


def test_who_opens_waits_for_nobody_who_is_stopped():
    (key,) = random_keys(1)
    with opened(timeout_s=0.1) as (store, contents, url):
        put(store, key, 1, 100)
        with (contents.folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            other = open_store(url)
        with closing(other):
            assert other.contains_prefix([key]) == 1


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


def test_who_missed_too_many_changes_looks_at_all(monkeypatch):
    kept, gone, passing = random_keys(3)
    with opened() as (store, contents, url), closing(open_store(url)) as other:
        store.put_many([kept, gone], [filled(1, 100), filled(2, 100)])
        other.delete([gone])
        num_rounds = extent_table._RING // 3 + 1
        for _ in range(num_rounds):
            put(other, passing, 3, 0)
            other.delete([passing])
        assert contents.table.num_changes > extent_table._RING + 4
        assert [store.contains_prefix([key]) for key in (kept, gone, passing)] == [1, 0, 0]
        put(store, gone, 4, 100)
        assert read(other, gone, 100) == bytes(filled(4, 100))
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
            assert stats.num_bytes == contents.table.object_bytes == 720
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


def _write_and_never_finish(url, has_begun):
    """Writes half an object, then waits to be killed."""

    def write_half(memory, start, parts):
        memory._mapped(start + 2500)[start : start + 2500] = parts[0][:2500]
        has_begun.set()
        threading.Event().wait()

    MappedMemory.write = write_half
    with closing(open_store(url)) as store:
        put(store, b"k" * 32, 1, 5000)


def test_a_writer_killed_half_way_leaves_nothing():
    with opened() as (store, contents, url):
        has_begun = _SPAWN.Event()
        writer = _SPAWN.Process(target=_write_and_never_finish, args=(url, has_begun))
        writer.start()
        try:
            assert has_begun.wait(_DEADLINE_S)
            open_store(url).close()  # lists
            assert store.contains_prefix([b"k" * 32]) == 0
            assert store.stats().num_bytes == 5000
        finally:
            writer.kill()
            writer.join()
        open_store(url).close()
        assert store.stats().num_bytes == contents.memory_bytes() == 0
        assert len(list((contents.folder / "writers").iterdir())) == 1
        contents.check()


def _take_the_lock(url, has_lock):
    """Begins to change the table, then waits to be killed."""
    with closing(open_store(url)) as store:
        note_change = extent_table.ExtentTable.note_change

        def stop_at_it(table, extent):
            note_change(table, extent)
            has_lock.set()
            threading.Event().wait()

        extent_table.ExtentTable.note_change = stop_at_it
        store.delete([b"k" * 32])


def test_a_process_killed_with_the_lock_hinders_nobody():
    (other,) = random_keys(1)
    with opened() as (store, contents, url):
        store.put_many([b"k" * 32, other], [filled(1, 5000)] * 2)
        has_lock = _SPAWN.Event()
        killed = _SPAWN.Process(target=_take_the_lock, args=(url, has_lock))
        killed.start()
        try:
            assert has_lock.wait(_DEADLINE_S)
        finally:
            killed.kill()
            killed.join()
        assert contents.table.is_changing
        assert [store.contains_prefix([key]) for key in (b"k" * 32, other)] == [0, 1]
        assert read(store, other, 5000) == bytes(filled(1, 5000))
        contents.check()


def test_a_put_that_outlasts_its_store_has_its_extent_for_itself(monkeypatch):
    late, new = random_keys(2)
    may_write, write = threading.Event(), MappedMemory.write
    has_begun = threading.Event()

    def write_late(memory, start, parts):
        if parts[0][0] == 1:
            has_begun.set()
            assert may_write.wait(_DEADLINE_S)
        write(memory, start, parts)

    monkeypatch.setattr(MappedMemory, "write", write_late)
    with opened() as (other, contents, url):
        store = open_store(url)
        failed = []

        def put_late():
            try:
                put(store, late, 1, 5000)
            except StoreUnavailableError as error:
                failed.append(error)

        thread = threading.Thread(target=put_late)
        thread.start()
        assert has_begun.wait(_DEADLINE_S)
        store.close()
        open_store(url).close()  # lists
        put(other, new, 2, 5000)
        may_write.set()
        thread.join()
        assert failed, "it cannot be committed"
        assert read(other, new, 5000) == bytes(filled(2, 5000))
        open_store(url).close()
        assert other.stats().num_bytes == 5000
        contents.check()


_CHURNED_KEYS = [bytes([index]) * 32 for index in range(60)]
_CHURNED_BYTES = 20_000


def _churn(url, seed):
    """Puts, deletes and reads objects of a byte per key; how many reads were torn or foreign."""
    generator = random.Random(seed)
    num_wrong = 0
    with closing(open_store(url)) as store:
        for _ in range(150):
            chosen = generator.sample(range(60), 6)
            keys = [_CHURNED_KEYS[index] for index in chosen]
            values = [filled(index, _CHURNED_BYTES) for index in chosen[:4]]
            store.put_frames(keys[:4], [(value[:64], value[64:]) for value in values])
            store.delete(keys[:1])
            frames = [(blank(64), blank(_CHURNED_BYTES - 64)) for _ in keys]
            statuses = store.get_frames_into(keys, frames)
            for status, frame, index in zip(statuses, frames, chosen, strict=True):
                is_right = b"".join(frame) == filled(index, _CHURNED_BYTES)
                num_wrong += status is GetStatus.HIT and not is_right
    return num_wrong


def test_processes_never_read_anothers_bytes_and_keep_one_bound():
    max_bytes = 30 * _CHURNED_BYTES
    with opened(max_bytes=max_bytes, timeout_s=30) as (store, contents, url):
        with _SPAWN.Pool(3) as pool:
            jobs = [(url, seed) for seed in range(3)]
            assert pool.starmap_async(_churn, jobs).get(60) == [0, 0, 0]
        contents.check()
        assert not contents.extents(State.WRITTEN_TO)
        assert store.stats().num_bytes == contents.table.object_bytes <= max_bytes


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
                assert 90 * _PAGE < contents.table.object_bytes <= 100 * _PAGE


def test_it_is_a_private_folder_of_the_machines_shared_memory():
    with opened() as (store, contents, _):
        put(store, *random_keys(1), 1, 100)
        folder = contents.folder
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
        assert all(mode & 0o077 == 0 for mode in modes.values())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_store, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_without_a_name_it_is_default(shared_memory):
    open_store("shm://").close()
    assert (shared_memory / "baton-default").is_dir()


def test_a_folder_that_others_can_use_is_refused(shared_memory):
    (shared_memory / "baton-open").mkdir(mode=0o755)
    (shared_memory / "baton-link").symlink_to(shared_memory)
    for name in ("open", "link"):
        with pytest.raises(ConfigurationError, match="choose another name"):
            open_store(f"shm://{name}")


def test_a_machine_without_shared_memory_is_told_what_to_use(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_store, "_SHARED_MEMORY", tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="use file:///path"):
        open_store("shm://x")


def test_memory_cannot_be_synced():
    with pytest.raises(ConfigurationError, match="fsync has no meaning in memory"):
        open_store("shm://never-made?fsync=commit")
