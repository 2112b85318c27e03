"""The file store when other processes, crashes and users change its folder."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from kvstore.conformance.objects import as_object, blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreFullError, StoreUnavailableError
from kvstore.stores import bounded_space, files, opening
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


def _remove_ledger(folder):
    (folder / "ledger").unlink()


def _replace(folder):
    folder.rename(folder.with_name("moved"))
    with opened(folder) as other:
        other.put(random_keys(1), [filled(1, 300)])


@pytest.mark.parametrize(
    ("remove", "num_left"),
    [
        (shutil.rmtree, 0),
        (_replace, 0),
        (_remove_ledger, 1),
        (lambda folder: shutil.rmtree(folder / "temporary"), 1),
        (lambda folder: shutil.rmtree(folder / "objects"), 0),
    ],
    ids=["all", "replaced", "ledger", "temporary", "objects"],
)
def test_a_folder_that_was_removed_is_opened_anew(folder, remove, num_left):
    old, new, shared = random_keys(3)
    with opened(folder) as store, opened(folder) as other:
        store.put([old], [filled(1, 100)])
        remove(folder)
        assert store.contains_prefix([old]) == num_left
        assert read(store, new, 100) is GetStatus.MISSING
        store.put([new], [filled(2, 100)])
        assert read(other, new, 100) == filled(2, 100).to_bytes()
        other.put([shared, new], [filled(3, 100)] * 2)
        assert store.contains_prefix([new, shared]) == 2
        assert used_bytes(folder) == store.stats().num_bytes == other.stats().num_bytes
        assert store.stats().puts == 2, "the counters go on"


def test_each_call_on_a_removed_folder_succeeds_once_it_can_be_made(tmp_path):
    """A mount that is absent at the start: the store is down until it is there."""
    target = tmp_path / "mount"
    (tmp_path / "link").symlink_to(target)
    with opened(tmp_path / "link" / "kv") as store:
        (key,) = random_keys(1)
        for call in (
            lambda: store.contains_prefix([key]),
            lambda: store.get_into([key], [blank(100)]),
            lambda: store.put([key], [filled(1, 100)]),
            lambda: store.delete([key]),
        ):
            with pytest.raises(StoreUnavailableError, match="No such file or directory"):
                call()
        assert store.stats().num_bytes is None
        target.mkdir()
        store.put([key], [filled(1, 100)])
        assert store.contains_prefix([key]) == 1


def test_a_mount_that_hangs_keeps_nothing_from_starting(folder, monkeypatch):
    may_go_on, make = threading.Event(), Path.mkdir

    def hang(path, *args, **kwargs):
        assert may_go_on.wait(30)
        make(path, *args, **kwargs)

    monkeypatch.setattr(opening, "_MAX_START_WAIT_S", 0.05)
    monkeypatch.setattr(Path, "mkdir", hang)
    with opened(folder, timeout_s=0.05) as store:
        with pytest.raises(StoreUnavailableError, match=r"more than 0\.05 s to open"):
            store.contains_prefix(random_keys(1))
        may_go_on.set()
        monkeypatch.setattr(store._opened, "_timeout_s", 30)
        assert store.contains_prefix(random_keys(1)) == 0


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
    with opened(folder) as store:
        with pytest.raises(StoreUnavailableError, match=f"all may write to {folder}/{inner}"):
            store.contains_prefix(random_keys(1))
        (folder / inner).chmod(0o700)
        assert store.contains_prefix(random_keys(1)) == 0


def test_a_folder_that_appears_just_before_it_is_made_is_refused(folder, monkeypatch):
    make = Path.mkdir

    def make_second(path, *args, **kwargs):
        if path == folder / "objects" and not path.exists():
            make(path)  # as another user would
            path.chmod(0o777)
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", make_second)
    with opened(folder) as store, pytest.raises(StoreUnavailableError, match="all may write to"):
        store.contains_prefix(random_keys(1))


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
    with opened(folder) as store:
        if is_used:
            assert store.contains_prefix(random_keys(1)) == 0
            return
        with pytest.raises(StoreUnavailableError, match=r"uid 12345 with mode.*root_squash"):
            store.contains_prefix(random_keys(1))


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


def test_a_path_that_leads_to_a_file_is_a_configuration_error(tmp_path):
    path = tmp_path / "obstacle"
    path.write_text("")
    with pytest.raises(ConfigurationError, match="cannot use the folder"):
        open_store(f"file://{path}")


def test_a_folder_that_cannot_be_made_is_a_store_that_is_down():
    with opened("/proc/nowhere") as store, pytest.raises(StoreUnavailableError, match="/proc"):
        store.put(random_keys(1), [filled(1, 100)])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT])
def test_an_object_that_cannot_be_touched_is_read_and_expires(folder, monkeypatch, number):
    keys = random_keys(2)
    touch = os.utime

    def refuse(path, **times):
        if isinstance(path, str):
            raise OSError(number, os.strerror(number), path)
        touch(path, **times)

    with opened(folder, ttl_s=600) as store:
        store.put(keys, [filled(1, 100)] * 2)
        old_ns = time.time_ns() - 700 * 10**9
        touch(object_path(folder, keys[1]), ns=(old_ns, old_ns))
        monkeypatch.setattr(os, "utime", refuse)
        assert store.contains_prefix(keys) == 1
        assert read(store, keys[0], 100) == filled(1, 100).to_bytes()
        assert read(store, keys[1], 100) is GetStatus.MISSING


def _clock_ahead(monkeypatch, seconds):
    """Sets the clock that this process sees, as on a machine with a wrong one."""
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + seconds * 10**9)


@pytest.mark.parametrize("seconds", [60, 700, -60, -700])
@pytest.mark.parametrize("is_first_wrong", [False, True])
def test_no_clock_deletes_what_another_machine_has_just_saved(
    folder, monkeypatch, caplog, seconds, is_first_wrong
):
    keys = random_keys(10)
    options = {"ttl_s": 600, "lease_s": 30, "max_bytes": 1000}
    with monkeypatch.context() as first:
        if is_first_wrong:
            _clock_ahead(first, seconds)
        with opened(folder, **options) as prefill:
            prefill.put(keys, [filled(1, 100)] * 10)
    if not is_first_wrong:
        _clock_ahead(monkeypatch, seconds)
    with opened(folder, **options) as decode:
        with pytest.raises(StoreFullError, match="full of leased objects"):
            decode.put(random_keys(1), [filled(1, 100)])
        assert decode.contains_prefix(keys) == 10
        assert decode.stats().expirations == 0
    direction = "ahead of" if seconds > 0 else "behind"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"KV store {folder.as_uri()}: this machine's clock is" in warning
    assert f"{abs(seconds)} s {direction} that of the file system" in warning


_PUT_OR_EVICT = """
import sys
from kvstore.conformance.objects import filled
from kvstore.registry import open_store
from kvstore.store import StoreFullError

keys = [bytes([number]) * 32 for number in range(10)]
store = open_store(sys.argv[1])
if store.contains_prefix(keys) == 0:
    store.put(keys, [filled(1, 100)] * 10)
else:
    try:
        store.put([b"x" * 32], [filled(1, 100)])
    except StoreFullError:
        print(store.contains_prefix(keys))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("faketime") is None, reason="the program faketime is absent")
def test_processes_with_other_clocks_delete_nothing(folder):
    url = f"{folder.as_uri()}?ttl_s=600&lease_s=30&max_bytes=1000"
    program = [sys.executable, "-c", _PUT_OR_EVICT, url]
    subprocess.run(program, check=True, timeout=60)
    for seconds in (60, -900):
        command = ["faketime", "-f", f"{seconds:+d}s", *program]
        done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
        assert done.stdout == "10\n"


def test_a_date_in_the_future_is_reported_once(folder, caplog):
    keys = random_keys(3)
    with opened(folder) as store:
        store.put(keys, [filled(1, 100)] * 3)
    future_ns = time.time_ns() + 100 * 10**9
    for key in keys:
        os.utime(object_path(folder, key), ns=(future_ns, future_ns))
    with opened(folder, max_bytes=300, lease_s=600) as store:
        for _ in range(2):
            with pytest.raises(StoreFullError):
                store.put(random_keys(1), [filled(1, 100)])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "dated 100 s in the future" in warning
    assert "lease_s=600" in warning


def test_a_diagnosis_changes_nothing(folder):
    keys = random_keys(11)
    with opened(folder, max_bytes=1000) as store:
        store.put(keys[:10], [filled(1, 100)] * 10)
    before = sorted(folder.rglob("*"))
    expired_ns = time.time_ns() - 700 * 10**9
    os.utime(object_path(folder, keys[0]), ns=(expired_ns, expired_ns))
    url = f"{folder.as_uri()}?ttl_s=600&lease_s=0&max_bytes=500"
    with closing(open_store(url, is_diagnosis=True)) as store:
        store.put(keys[10:], [filled(2, 400)])
        assert read(store, keys[10], 400) == filled(2, 400).to_bytes()
        store.delete(keys[10:])
    assert sorted(folder.rglob("*")) == before
    with opened(folder, ttl_s=3600) as store:
        assert store.contains_prefix(keys[:10]) == 10


def test_a_diagnosis_leaves_no_folder_that_it_has_made(tmp_path):
    folder = tmp_path / "new" / "kv"
    with closing(open_store(folder.as_uri(), is_diagnosis=True)) as store:
        keys = random_keys(1)
        store.put(keys, [filled(1, 100)])
        store.delete(keys)
    assert not list(tmp_path.iterdir())


def test_opening_evicts_nothing_even_beyond_max_bytes(folder):
    keys = random_keys(10)
    with opened(folder, max_bytes=1000) as store:
        store.put(keys, [filled(1, 100)] * 10)
    with opened(folder, max_bytes=500) as store:
        assert store.contains_prefix(keys) == 10
        store.put(random_keys(1), [filled(1, 100)])
        assert used_bytes(folder) <= 500, "a put keeps to max_bytes"


def test_the_bound_is_logged_when_it_is_found_and_when_it_has_changed(folder, monkeypatch, caplog):
    free = [100 << 20]

    def disk_usage(path):
        return shutil._ntuple_diskusage(1 << 30, 10 << 20, free[0])

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(bounded_space, "_UPDATE_S", 0)
    with caplog.at_level("INFO", "baton.kvstore"), opened(folder) as store:
        for free[0] in (100 << 20, 110 << 20, 30 << 20):
            store.put(random_keys(1), [filled(1, 100)])
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2
    for line, bound in zip(logged, ("50.0 MiB", "15.0 MiB"), strict=True):
        assert line.startswith(f"KV store {folder.as_uri()} holds up to {bound}")
