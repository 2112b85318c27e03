"""The file and shm stores under what other processes, crashes and users do to their folder."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import stat
import time
import uuid
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from baton.errors import ConfigurationError
from kvstore.conformance.objects import blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores import directory, folder_space, object_folder
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
def test_what_is_no_regular_file_is_missing_and_left_alone(folder, kind):
    (key,) = random_keys(1)
    with opened(folder, max_bytes=1000) as store:
        _make_foreign(object_path(folder, key), kind)
        store.put_many([key], [filled(1, 100)])
        assert read(store, key, 100) is GetStatus.MISSING
        assert store.contains_prefix([key]) == 0
        assert store.delete([key]) == 0
        store.put_many(random_keys(20), [filled(1, 100)] * 20)
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
        store.put_many(random_keys(30), [filled(1, 100)] * 30)
    assert all(path.exists() for path in foreign)


def test_a_truncated_object_has_the_wrong_size(folder):
    (key,) = random_keys(1)
    with opened(folder) as store:
        store.put_many([key], [filled(1, 100)])
        os.truncate(object_path(folder, key), 40)
        assert read(store, key, 100) is GetStatus.WRONG_SIZE


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"\xff" * 100])
def test_a_corrupt_ledger_is_put_right_on_opening(folder, content):
    keys = random_keys(3)
    with opened(folder) as store:
        store.put_many(keys, [filled(1, 100)] * 3)
    (folder / "ledger").write_bytes(content)
    with opened(folder) as store:
        assert store.stats().num_bytes == 300
        assert store.contains_prefix(keys) == 3


def test_a_ledger_corrupted_while_open_is_put_right_by_the_next_put(folder):
    with opened(folder, max_bytes=1000) as store:
        store.put_many(random_keys(3), [filled(1, 100)] * 3)
        (folder / "ledger").write_bytes(b"\xff" * 8)
        store.put_many(random_keys(1), [filled(1, 100)])
        assert store.stats().num_bytes == 400


def test_a_dead_writers_file_is_swept_and_a_living_ones_kept(folder):
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
        os.write(fd, parts[0][: len(parts[0]) // 2])
        has_begun.set()
        time.sleep(60)

    object_folder.write_all = write_half
    with opened(folder) as store:
        store.put_many([b"k" * 32], [filled(1, 1000)])


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


def test_a_full_disk_is_unavailable_and_leaves_nothing(folder, monkeypatch):
    keys = random_keys(2)

    def write_until_full(fd, parts):
        os.write(fd, parts[0][:50])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(folder) as store:
        with monkeypatch.context() as patched:
            patched.setattr(object_folder, "write_all", write_until_full)
            with pytest.raises(StoreUnavailableError, match="No space left"):
                store.put_many(keys[:1], [filled(1, 100)])
        assert used_bytes(folder) == store.stats().num_bytes == 0
        store.put_many(keys, [filled(1, 100)] * 2)
        assert store.contains_prefix(keys) == 2


def test_a_held_lock_is_unavailable_in_time_and_reads_go_on(folder):
    old, new = random_keys(2)
    with opened(folder, timeout_s=0.1) as store:
        store.put_many([old], [filled(1, 100)])
        with (folder / "ledger").open("rb") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            with pytest.raises(StoreUnavailableError, match="lock"):
                store.put_many([new], [filled(1, 100)])
            with pytest.raises(StoreUnavailableError, match="lock"):
                store.delete([old])
            assert read(store, old, 100) == bytes(filled(1, 100))
            with opened(folder, timeout_s=0.1) as other:
                assert other.contains_prefix([old]) == 1
        store.put_many([new], [filled(1, 100)])
        assert store.contains_prefix([old, new]) == 2


def test_a_folder_that_vanished_is_unavailable(folder):
    with opened(folder) as store:
        shutil.rmtree(folder)
        with pytest.raises(StoreUnavailableError):
            store.put_many(random_keys(1), [filled(1, 100)])
        assert store.contains_prefix(random_keys(1)) == 0
        assert store.get_many_into(random_keys(1), [blank(5)]) == [GetStatus.MISSING]


def test_expired_objects_go_from_the_disk(folder):
    with opened(folder, ttl_s=600) as store:
        keys = random_keys(3)
        store.put_many(keys, [filled(1, 100)] * 3)
    for key in keys[:2]:
        os.utime(object_path(folder, key), (1, 1))
    with opened(folder, ttl_s=600) as store:
        assert store.contains_prefix(keys[2:]) == 1
        assert used_bytes(folder) == store.stats().num_bytes == 100


def test_a_look_up_touches_what_lives_and_nothing_else(folder):
    old, expired, behind = keys = random_keys(3)
    now_ns = time.time_ns()
    old_ns, expired_ns = now_ns - 300 * 10**9, now_ns - 900 * 10**9
    with opened(folder, ttl_s=600, timeout_s=0.1) as store:
        store.put_many(keys, [filled(1, 100)] * 3)
        for key, touched_ns in ((old, old_ns), (expired, expired_ns), (behind, old_ns)):
            os.utime(object_path(folder, key), ns=(touched_ns, touched_ns))
        with (folder / "ledger").open("rb") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)  # a look-up waits for nobody
            assert store.contains_prefix(keys) == 1
        touched = [object_path(folder, key).stat().st_mtime_ns for key in keys]
        assert touched[0] >= now_ns
        assert touched[1:] == [expired_ns, old_ns]


def test_what_is_touched_while_others_are_evicted_stays(folder, monkeypatch):
    keys = random_keys(9)
    status_of = folder_space.status_of

    with opened(folder, max_bytes=1000) as store:
        for key in keys:
            store.put_many([key], [filled(1, 100)])

        def look_and_touch(path):
            status = status_of(path)
            store.contains_prefix(keys[:2])
            return status

        monkeypatch.setattr(folder_space, "status_of", look_and_touch)
        store.put_many(random_keys(1), [filled(1, 200)])
        assert store.contains_prefix(keys[:2]) == 2
        assert store.contains_prefix(keys[2:3]) == 0
        assert used_bytes(folder) == store.stats().num_bytes


def test_a_full_store_of_leased_objects_keeps_them_and_its_ledger(folder):
    keys = random_keys(10)
    with opened(folder, max_bytes=1000, lease_s=600) as store:
        store.put_many(keys, [filled(1, 100)] * 10)
        with pytest.raises(StoreUnavailableError, match="full of leased objects"):
            store.put_many(random_keys(1), [filled(1, 100)])
        assert store.contains_prefix(keys) == 10
        leased_ns = time.time_ns() - 599 * 10**9
        for key in keys[:3]:
            os.utime(object_path(folder, key), ns=(leased_ns, leased_ns))
        with pytest.raises(StoreUnavailableError, match="full of leased objects"):
            store.put_many(random_keys(1), [filled(1, 100)])
        os.utime(object_path(folder, keys[1]), ns=(leased_ns - 2 * 10**9,) * 2)
        store.put_many(random_keys(1), [filled(1, 100)])
        assert [store.contains_prefix([key]) for key in keys[:3]] == [1, 0, 1]
        assert used_bytes(folder) == store.stats().num_bytes == 1000


def test_fsync_commit_syncs_the_object_before_its_name_and_then_the_name(folder, monkeypatch):
    keys, synced = random_keys(2), []
    sync = os.fsync

    def record(fd):
        sync(fd)
        kind = "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "object"
        synced.append((kind, sum(object_path(folder, key).exists() for key in keys)))

    with opened(folder, fsync="commit") as store:
        monkeypatch.setattr(os, "fsync", record)
        store.put_many(keys, [filled(1, 100)] * 2)
        assert synced[:2] == [("object", 0)] * 2
        assert set(synced[2:]) == {("folder", 2)}
        synced.clear()
        store.put_many(keys, [filled(1, 100)] * 2)
        assert not synced, "nothing new, nothing to sync"


def test_a_disk_that_cannot_sync_keeps_nothing(folder, monkeypatch):
    def refuse(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(folder, fsync="commit") as store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", refuse)
            with pytest.raises(StoreUnavailableError, match="Input/output error"):
                store.put_many(random_keys(2), [filled(1, 100)] * 2)
        assert used_bytes(folder) == store.stats().num_bytes == 0


def test_nothing_is_synced_unless_asked(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("synced"))
    with opened(folder) as store:
        store.put_many(random_keys(2), [filled(1, 100)] * 2)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///tmp/never-made?fsync=always", "fsync is 'always'; it must be never or commit"),
        ("shm://never-made?fsync=commit", "fsync has no meaning in memory"),
    ],
)
def test_what_cannot_be_synced_is_refused(url, message):
    with pytest.raises(ConfigurationError, match=message):
        open_store(url)


def test_stats_tell_what_went_and_the_age_that_the_last_listing_saw(folder):
    keys = random_keys(10)
    now_ns = time.time_ns()
    with opened(folder, ttl_s=600) as store:
        assert store.stats().oldest_age_s is None
        store.put_many(keys, [filled(1, 100)] * 10)
    for key, age_s in zip(keys, (1000, 900, 500, 400, 300, 200, 100, 90, 80, 70), strict=True):
        os.utime(object_path(folder, key), ns=(now_ns - age_s * 10**9,) * 2)
    with opened(folder, ttl_s=600, max_bytes=900) as store:
        stats = store.stats()
        assert (stats.evictions, stats.expirations) == (0, 2)
        assert 500 <= stats.oldest_age_s < 590
        store.put_many(random_keys(1), [filled(1, 200)])
        stats = store.stats()
        assert (stats.evictions, stats.expirations) == (1, 2)
        assert 400 <= stats.oldest_age_s < 490


def test_one_listing_serves_until_all_it_saw_is_gone(folder, monkeypatch):
    listings = []
    list_objects = folder_space.list_objects

    def count_listings(path):
        listings.append(path)
        return list_objects(path)

    monkeypatch.setattr(folder_space, "list_objects", count_listings)
    with opened(folder, max_bytes=1000) as store:
        for key in random_keys(50):
            store.put_many([key], [filled(1, 100)])
    assert 4 <= len(listings) <= 6


def _churn(folder, number):
    with opened(folder, max_bytes=40_000, timeout_s=30) as store:
        keys = random_keys(150)
        for index, key in enumerate(keys):
            store.put_many([key], [filled(number, 100 + index * 5)])
            if index % 7 == 0:
                store.delete([key])
        shared_keys = [bytes([index]) * 32 for index in range(30)]
        store.put_many(shared_keys, [filled(number, 500)] * 30)


def test_processes_keep_one_exact_ledger_and_one_bound(folder):
    with _SPAWN.Pool(3) as pool:
        pool.starmap_async(_churn, [(folder, number) for number in range(3)]).get(60)
    recorded_bytes = int.from_bytes((folder / "ledger").read_bytes()[:8], "little")
    assert recorded_bytes == used_bytes(folder)
    assert 20_000 < recorded_bytes <= 40_000


def test_the_default_bound_is_half_of_the_free_space(folder, monkeypatch):
    """Free space counts what the store holds itself, so that every opener finds the same bound."""

    def disk_usage(path):
        in_use = used_bytes(folder)
        return shutil._ntuple_diskusage(100_000, in_use, 100_000 - in_use)

    monkeypatch.setattr(folder_space.shutil, "disk_usage", disk_usage)
    for _ in range(3):
        with opened(folder) as store:
            store.put_many(random_keys(100), [filled(1, 1000)] * 100)
            assert 40_000 < used_bytes(folder) <= 50_000


@pytest.mark.parametrize("obstacle", ["file", "unwritable"])
def test_an_unusable_folder_is_a_configuration_error(tmp_path, obstacle):
    path = tmp_path / "obstacle"
    path.write_text("")
    folder = path if obstacle == "file" else Path("/proc/nowhere")
    with pytest.raises(ConfigurationError, match="cannot use the folder"):
        open_store(f"file://{folder}")


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_shm_is_a_private_folder_of_the_machines_shared_memory():
    name = f"test-{uuid.uuid4().hex}"
    folder = Path(f"/dev/shm/baton-{name}")
    try:
        with closing(open_store(f"shm://{name}")) as store:
            store.put_many(random_keys(1), [filled(1, 100)])
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
        assert all(mode & 0o077 == 0 for mode in modes.values())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_shm_without_a_name_is_default(shared_memory):
    open_store("shm://").close()
    assert (shared_memory / "baton-default").is_dir()


def test_shm_refuses_a_folder_that_others_can_use(shared_memory):
    (shared_memory / "baton-open").mkdir(mode=0o755)
    (shared_memory / "baton-link").symlink_to(shared_memory)
    for name in ("open", "link"):
        with pytest.raises(ConfigurationError, match="choose another name"):
            open_store(f"shm://{name}")


def test_a_machine_without_shared_memory_is_told_what_to_use(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_SHARED_MEMORY", tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="use file:///path"):
        open_store("shm://x")
