"""The file store when other processes, crashes and users change its folder."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import stat
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from baton.errors import ConfigurationError
from kvstore.conformance.objects import as_object, blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreFullError, StoreUnavailableError
from kvstore.stores import files
from kvstore.stores.file import folder_space
from kvstore.stores.file import store as file_store
from tests.support.store_folder import object_path, used_bytes

_SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@contextmanager
def opened(folder, **options):
    options = {"lease_s": 0, **options}
    query = "&".join(f"{name}={value}" for name, value in options.items())
    with closing(open_store(f"file://{folder}?{query}")) as store:
        yield store


def _make_foreign(path, kind):
    {
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "dangling link": lambda: path.symlink_to("nowhere"),
        "link": lambda: path.symlink_to(__file__),
    }[kind]()


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling link", "link"])
def test_an_entry_that_is_not_a_regular_file_is_missing_and_kept(folder, kind):
    (key,) = random_keys(1)
    with opened(folder, max_bytes=1000) as store:
        _make_foreign(object_path(folder, key), kind)
        store.put([key], [filled(1, 100)])
        assert read(store, key, 100) is GetStatus.MISSING
        assert store.contains_prefix([key]) == 0
        assert store.delete([key]) == 0
        store.put(random_keys(20), [filled(1, 100)] * 20)
    assert object_path(folder, key).lstat()


def test_foreign_files_in_the_folder_do_not_matter(folder):
    with opened(folder):
        pass
    foreign = [
        folder / "README",
        folder / "objects" / "note",
        folder / "objects" / "ab" / "not-hex",
        folder / "objects" / "ab" / "sub",
        folder / "temporary" / "sub",
    ]
    for path in foreign[:3]:
        path.write_bytes(b"x" * 5000)
    for path in foreign[3:]:
        path.mkdir()
    with opened(folder, max_bytes=1000) as store:
        assert store.stats().num_bytes == 0
        store.put(random_keys(30), [filled(1, 100)] * 30)
    assert all(path.exists() for path in foreign)


def test_a_truncated_object_has_the_wrong_size(folder):
    (key,) = random_keys(1)
    with opened(folder) as store:
        store.put([key], [filled(1, 100)])
        os.truncate(object_path(folder, key), 40)
        assert read(store, key, 100) is GetStatus.WRONG_SIZE


@pytest.mark.parametrize("num_bytes", [0, 63, 64, 99])
def test_an_object_truncated_during_its_read_has_the_wrong_size(folder, monkeypatch, num_bytes):
    (key,) = random_keys(1)
    with opened(folder) as store:
        store.put([key], [filled(1, 100)])

        def cut_then_read(fd, parts):
            os.truncate(object_path(folder, key), num_bytes)
            return files.read_all(fd, parts)

        monkeypatch.setattr(file_store, "read_all", cut_then_read)
        assert store.get_into([key], [blank(100)]) == [GetStatus.WRONG_SIZE]


def test_an_object_deleted_during_its_read_is_missing(folder, monkeypatch):
    (key,) = random_keys(1)
    with opened(folder) as store:
        store.put([key], [filled(1, 100)])

        def delete_then_read(fd, parts):
            store.delete([key])
            return files.read_all(fd, parts)

        monkeypatch.setattr(file_store, "read_all", delete_then_read)
        assert store.get_into([key], [blank(100)]) == [GetStatus.MISSING], "the object has no lease"


@pytest.mark.parametrize("most", [1, 7, 63, 64, 65, 100])
def test_short_reads_and_writes_are_continued(folder, monkeypatch, most):
    keys = random_keys(2)
    value = bytes(range(200))

    def short(call):
        def short_call(fd, parts, *args):
            left, shortened = most, []
            for part in parts:
                shortened.append(part[:left])
                left -= len(shortened[-1])
            return call(fd, shortened, *args)

        return short_call

    with opened(folder) as store:
        for name in ("readv", "pwritev"):
            monkeypatch.setattr(os, name, short(getattr(os, name)))
        store.put(keys, [as_object(value), as_object(value, 0)])
        for key in keys:
            assert read(store, key, 200) == value == read(store, key, 200, 0)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"\xff" * 100])
def test_a_corrupt_ledger_is_corrected_on_opening(folder, content):
    keys = random_keys(3)
    with opened(folder) as store:
        store.put(keys, [filled(1, 100)] * 3)
    (folder / "ledger").write_bytes(content)
    with opened(folder) as store:
        assert store.stats().num_bytes == 300
        assert store.contains_prefix(keys) == 3


def test_a_ledger_corrupted_while_open_is_corrected_by_the_next_put(folder):
    with opened(folder, max_bytes=1000) as store:
        store.put(random_keys(3), [filled(1, 100)] * 3)
        (folder / "ledger").write_bytes(b"\xff" * 8)
        store.put(random_keys(1), [filled(1, 100)])
        assert store.stats().num_bytes == 400


def test_a_dead_writers_file_is_removed_and_a_living_writers_kept(folder):
    with opened(folder):
        pass
    dead, living = folder / "temporary" / "dead", folder / "temporary" / "living"
    dead.write_bytes(b"x" * 1000)
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(500)
        with opened(folder) as store:
            assert not dead.exists()
            assert living.exists()
            assert store.stats().num_bytes == 500
    with opened(folder) as store:
        assert not living.exists()
        assert store.stats().num_bytes == 0


def _write_and_never_finish(folder, has_begun):
    """Writes half an object, then waits to be killed."""

    def write_half(fd, parts):
        os.write(fd, parts[1][: len(parts[1]) // 2])
        has_begun.set()
        time.sleep(60)

    file_store.write_all = write_half
    with opened(folder) as store:
        store.put([b"k" * 32], [filled(1, 1000)])


def test_a_writer_killed_half_way_leaves_nothing(folder):
    has_begun = _SPAWN.Event()
    writer = _SPAWN.Process(target=_write_and_never_finish, args=(folder, has_begun))
    writer.start()
    try:
        assert has_begun.wait(30)
        with opened(folder) as store:
            assert store.contains_prefix([b"k" * 32]) == 0
            assert store.stats().num_bytes == 1000
    finally:
        writer.kill()
        writer.join()
    with opened(folder) as store:
        assert store.contains_prefix([b"k" * 32]) == 0
        assert used_bytes(folder) == store.stats().num_bytes == 0


def test_a_put_onto_a_full_disk_fails_and_leaves_nothing(folder, monkeypatch):
    keys = random_keys(2)

    def write_until_full(fd, parts):
        os.write(fd, parts[0][:50])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(folder) as store:
        with monkeypatch.context() as patched:
            patched.setattr(file_store, "write_all", write_until_full)
            with pytest.raises(StoreUnavailableError, match="No space left"):
                store.put(keys[:1], [filled(1, 100)])
        assert used_bytes(folder) == store.stats().num_bytes == 0
        store.put(keys, [filled(1, 100)] * 2)
        assert store.contains_prefix(keys) == 2


def test_writes_fail_in_time_and_reads_continue_while_the_lock_is_held(folder):
    old, new = random_keys(2)
    with opened(folder, timeout_s=0.1) as store:
        store.put([old], [filled(1, 100)])
        with (folder / "ledger").open("rb") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            with pytest.raises(StoreUnavailableError, match="lock"):
                store.put([new], [filled(1, 100)])
            with pytest.raises(StoreUnavailableError, match="lock"):
                store.delete([old])
            assert read(store, old, 100) == filled(1, 100).to_bytes()
            with opened(folder, timeout_s=0.1) as other:
                assert other.contains_prefix([old]) == 1
        store.put([new], [filled(1, 100)])
        assert store.contains_prefix([old, new]) == 2


def test_a_store_whose_folder_was_removed_refuses_puts_and_finds_nothing(folder):
    with opened(folder) as store:
        shutil.rmtree(folder)
        with pytest.raises(StoreUnavailableError):
            store.put(random_keys(1), [filled(1, 100)])
        assert store.contains_prefix(random_keys(1)) == 0
        assert store.get_into(random_keys(1), [blank(5)]) == [GetStatus.MISSING]


def test_expired_objects_are_removed_from_the_disk(folder):
    with opened(folder, ttl_s=600) as store:
        keys = random_keys(3)
        store.put(keys, [filled(1, 100)] * 3)
    for key in keys[:2]:
        os.utime(object_path(folder, key), (1, 1))
    with opened(folder, ttl_s=600) as store:
        assert store.contains_prefix(keys[2:]) == 1
        assert used_bytes(folder) == store.stats().num_bytes == 100


def test_a_lookup_touches_only_the_objects_it_finds(folder):
    old, expired, behind = keys = random_keys(3)
    now_ns = time.time_ns()
    old_ns, expired_ns = now_ns - 300 * 10**9, now_ns - 900 * 10**9
    with opened(folder, ttl_s=600, timeout_s=0.1) as store:
        store.put(keys, [filled(1, 100)] * 3)
        for key, touched_ns in ((old, old_ns), (expired, expired_ns), (behind, old_ns)):
            os.utime(object_path(folder, key), ns=(touched_ns, touched_ns))
        with (folder / "ledger").open("rb") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)  # a lookup does not wait for the lock
            assert store.contains_prefix(keys) == 1
        touched = [object_path(folder, key).stat().st_mtime_ns for key in keys]
        assert touched[0] >= now_ns
        assert touched[1:] == [expired_ns, old_ns]


def test_an_object_touched_during_an_eviction_is_kept(folder, monkeypatch):
    keys = random_keys(9)
    status_of = folder_space.status_of

    with opened(folder, max_bytes=1000) as store:
        for key in keys:
            store.put([key], [filled(1, 100)])

        def look_and_touch(path):
            status = status_of(path)
            store.contains_prefix(keys[:2])
            return status

        monkeypatch.setattr(folder_space, "status_of", look_and_touch)
        store.put(random_keys(1), [filled(1, 200)])
        assert store.contains_prefix(keys[:2]) == 2
        assert store.contains_prefix(keys[2:3]) == 0
        assert used_bytes(folder) == store.stats().num_bytes


def test_a_full_store_of_leased_objects_keeps_them_and_its_ledger(folder):
    keys = random_keys(10)
    with opened(folder, max_bytes=1000, lease_s=600) as store:
        store.put(keys, [filled(1, 100)] * 10)
        with pytest.raises(StoreFullError, match="full of leased objects"):
            store.put(random_keys(1), [filled(1, 100)])
        assert store.contains_prefix(keys) == 10
        leased_ns = time.time_ns() - 599 * 10**9
        for key in keys[:3]:
            os.utime(object_path(folder, key), ns=(leased_ns, leased_ns))
        with pytest.raises(StoreFullError, match="full of leased objects"):
            store.put(random_keys(1), [filled(1, 100)])
        os.utime(object_path(folder, keys[1]), ns=(leased_ns - 2 * 10**9,) * 2)
        store.put(random_keys(1), [filled(1, 100)])
        assert [store.contains_prefix([key]) for key in keys[:3]] == [1, 0, 1]
        assert used_bytes(folder) == store.stats().num_bytes == 1000


@pytest.mark.parametrize("inner", ["objects", "temporary"])
def test_a_folder_that_another_user_may_have_filled_is_refused(folder, inner):
    (folder / inner).mkdir(parents=True)
    (folder / inner).chmod(0o757)
    with pytest.raises(ConfigurationError, match=f"{inner} belongs to another user, or all may"):
        open_store(folder.as_uri())


def test_a_folder_that_appears_just_before_it_is_made_is_refused(folder, monkeypatch):
    make = Path.mkdir

    def make_second(path, *args, **kwargs):
        if path == folder / "objects" and not path.exists():
            make(path)  # as another user would
            path.chmod(0o777)
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", make_second)
    with pytest.raises(ConfigurationError, match="objects belongs to another user, or all may"):
        open_store(folder.as_uri())


@pytest.mark.skipif(os.getuid() != 0, reason="gives folders to another user")
@pytest.mark.parametrize(
    ("group", "mode", "is_used"), [(0, 0o2770, True), (0, 0o2750, False), (1, 0o770, False)]
)
def test_a_folder_of_another_user_is_used_if_it_is_shared_with_a_group(
    folder, group, mode, is_used
):
    open_store(folder.as_uri()).close()
    os.chown(folder / "objects", 12345, group)
    (folder / "objects").chmod(mode)
    if is_used:
        open_store(folder.as_uri()).close()
    else:
        with pytest.raises(ConfigurationError, match="belongs to another user"):
            open_store(folder.as_uri())


def test_a_store_is_usable_after_the_clock_was_set_back(folder):
    keys = random_keys(10)
    with opened(folder, max_bytes=1000) as store:
        store.put(keys, [filled(1, 100)] * 10)
        future_ns = time.time_ns() + 3600 * 10**9
        for key in keys:
            os.utime(object_path(folder, key), ns=(future_ns, future_ns))
        others = random_keys(3)
        store.put(others, [filled(1, 100)] * 3)
        assert store.contains_prefix(others) == 3
        assert used_bytes(folder) == store.stats().num_bytes == 1000
    touched = [
        path.stat().st_mtime_ns for path in (folder / "objects").rglob("*") if path.is_file()
    ]
    assert len(touched) == 10
    assert max(touched) <= time.time_ns()


def test_fsync_commit_syncs_the_object_before_its_name_and_then_the_name(folder, monkeypatch):
    keys, synced = random_keys(2), []
    sync = os.fsync

    def record(fd):
        sync(fd)
        kind = "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "object"
        synced.append((kind, sum(object_path(folder, key).exists() for key in keys)))

    with opened(folder, fsync="commit") as store:
        monkeypatch.setattr(os, "fsync", record)
        store.put(keys, [filled(1, 100)] * 2)
        assert synced[:2] == [("object", 0)] * 2
        assert set(synced[2:]) == {("folder", 2)}
        synced.clear()
        store.put(keys, [filled(1, 100)] * 2)
        assert not synced, "no object is new, so nothing needs a sync"


def test_a_put_that_cannot_be_synced_leaves_nothing(folder, monkeypatch):
    def refuse(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(folder, fsync="commit") as store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", refuse)
            with pytest.raises(StoreUnavailableError, match="Input/output error"):
                store.put(random_keys(2), [filled(1, 100)] * 2)
        assert used_bytes(folder) == store.stats().num_bytes == 0


def test_nothing_is_synced_by_default(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("synced"))
    with opened(folder) as store:
        store.put(random_keys(2), [filled(1, 100)] * 2)


def test_an_unknown_value_of_fsync_is_refused():
    message = "fsync is 'always'; it must be never or commit"
    with pytest.raises(ConfigurationError, match=message):
        open_store("file:///tmp/never-made?fsync=always")


def test_stats_count_removals_and_the_oldest_age_at_the_last_listing(folder):
    keys = random_keys(10)
    now_ns = time.time_ns()
    with opened(folder, ttl_s=600) as store:
        assert store.stats().oldest_age_s is None
        store.put(keys, [filled(1, 100)] * 10)
    for key, age_s in zip(keys, (1000, 900, 500, 400, 300, 200, 100, 90, 80, 70), strict=True):
        os.utime(object_path(folder, key), ns=(now_ns - age_s * 10**9,) * 2)
    with opened(folder, ttl_s=600, max_bytes=900) as store:
        stats = store.stats()
        assert (stats.evictions, stats.expirations) == (0, 2)
        assert 500 <= stats.oldest_age_s < 590
        store.put(random_keys(1), [filled(1, 200)])
        stats = store.stats()
        assert (stats.evictions, stats.expirations) == (1, 2)
        assert 400 <= stats.oldest_age_s < 490


def test_one_listing_serves_until_all_its_objects_are_evicted(folder, monkeypatch):
    listings = []
    list_objects = folder_space.list_objects

    def count_listings(path):
        listings.append(path)
        return list_objects(path)

    monkeypatch.setattr(folder_space, "list_objects", count_listings)
    with opened(folder, max_bytes=1000) as store:
        for key in random_keys(50):
            store.put([key], [filled(1, 100)])
    assert 4 <= len(listings) <= 6


def _churn(folder, number):
    with opened(folder, max_bytes=40_000, timeout_s=30) as store:
        keys = random_keys(150)
        for index, key in enumerate(keys):
            store.put([key], [filled(number, 100 + index * 5)])
            if index % 7 == 0:
                store.delete([key])
        shared_keys = [bytes([index]) * 32 for index in range(30)]
        store.put(shared_keys, [filled(number, 500)] * 30)


def test_processes_keep_one_exact_ledger_and_one_bound(folder):
    with _SPAWN.Pool(3) as pool:
        pool.starmap_async(_churn, [(folder, number) for number in range(3)]).get(60)
    recorded_bytes = int.from_bytes((folder / "ledger").read_bytes()[:8], "little")
    assert recorded_bytes == used_bytes(folder)
    assert 20_000 < recorded_bytes <= 40_000


def test_the_default_bound_is_half_of_the_free_space(folder, monkeypatch):
    """Free space includes what the store itself holds, so every opener finds the same bound."""

    def disk_usage(path):
        in_use = used_bytes(folder)
        return shutil._ntuple_diskusage(100_000, in_use, 100_000 - in_use)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    for _ in range(3):
        with opened(folder) as store:
            store.put(random_keys(100), [filled(1, 1000)] * 100)
            assert 40_000 < used_bytes(folder) <= 50_000


@pytest.mark.parametrize("obstacle", ["file", "unwritable"])
def test_an_unusable_folder_is_a_configuration_error(tmp_path, obstacle):
    path = tmp_path / "obstacle"
    path.write_text("")
    folder = path if obstacle == "file" else Path("/proc/nowhere")
    with pytest.raises(ConfigurationError, match="cannot use the folder"):
        open_store(f"file://{folder}")
