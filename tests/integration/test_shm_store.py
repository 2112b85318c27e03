"""The shm store's folder, lock and options, and calls that overlap."""

import fcntl
import os
import shutil
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from kvstore.conformance.objects import blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores import files
from kvstore.stores.shm import extent_table
from kvstore.stores.shm import store as shm_store
from kvstore.stores.shm.extent_table import State
from kvstore.stores.shm.writers import Writers
from tests.support.shm_arena import interposed, opened, put


def test_an_object_deleted_during_its_read_is_missing(monkeypatch):
    old, new = random_keys(2)
    with opened() as (store, contents, url), closing(open_store(url)) as other:
        put(store, old, 1, 5000)
        index = contents.objects()[old].index

        def replace():
            other.delete([old])
            put(other, new, 2, 5000)

        interposed(monkeypatch, "read", replace)
        assert store.get_into([old], [blank(5000)]) == [GetStatus.MISSING]
        assert contents.objects()[new].index == index
        assert read(store, new, 5000) == filled(2, 5000).to_bytes()


def test_an_object_replaced_during_its_read_is_missing(monkeypatch):
    (key,) = random_keys(1)
    with opened() as (store, _, url), closing(open_store(url)) as other:
        put(store, key, 1, 5000)

        def replace():
            other.delete([key])
            put(other, key, 2, 5000)

        interposed(monkeypatch, "read", replace)
        assert read(store, key, 5000) is GetStatus.MISSING
        assert read(store, key, 5000) == filled(2, 5000).to_bytes()


def test_the_first_of_two_puts_of_a_key_wins(monkeypatch):
    (key,) = random_keys(1)
    with opened() as (store, contents, url), closing(open_store(url)) as other:
        interposed(monkeypatch, "write", lambda: put(other, key, 2, 5000))
        put(store, key, 1, 5000)
        assert read(store, key, 5000) == filled(2, 5000).to_bytes()
        assert [extent.state for extent in contents.extents()].count(State.FREE) == 1
        contents.check()


def test_one_key_twice_in_a_batch_is_one_object():
    (key,) = random_keys(1)
    with opened() as (store, contents, _):
        store.put([key, key], [filled(1, 5000), filled(2, 5000)])
        assert read(store, key, 5000) == filled(1, 5000).to_bytes()
        contents.check()


def test_calls_fail_in_time_while_the_lock_is_held():
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


@pytest.mark.parametrize(
    ("removed", "is_kept"),
    [("", False), ("lock", False), ("memory", True), ("table", True), ("opening", True)],
)
def test_a_store_whose_files_were_removed_is_opened_anew(removed, is_kept):
    """Running processes notice it by the lock, openers by any of the files."""
    old, new = random_keys(2)
    with opened() as (store, contents, url), closing(open_store(url)) as other:
        put(store, old, 1, 100)
        if removed:
            (contents.folder / removed).unlink()
        else:
            shutil.rmtree(contents.folder)
        assert store.contains_prefix([old]) == is_kept
        with closing(open_store(url)) as third:
            put(store, new, 2, 5000)
            for each in (other, third):
                assert each.contains_prefix([new]) == 1
                assert read(each, new, 5000) == filled(2, 5000).to_bytes()


@pytest.mark.parametrize("spoil", ["length", "format"])
def test_the_table_of_another_version_is_refused(spoil):
    with opened() as (store, contents, url):
        if spoil == "length":
            os.truncate(contents.folder / "table", 1000)
        else:
            contents.header.format = int.from_bytes(b"BATONSH2", "little")
        difference = {"length": r"1000 bytes.*\d+", "format": "'BATONSH2', this one has 'BATONSH3'"}
        with closing(open_store(url)) as other:
            refusal = f"another version of Baton made it, with .*{difference[spoil]}"
            with pytest.raises(StoreUnavailableError, match=refusal):
                other.contains_prefix([])
            if spoil == "format":  # the open store still reads its table
                assert store.stats().num_bytes == 0
            shutil.rmtree(contents.folder)
            assert other.contains_prefix([]) == 0


def test_a_put_while_the_store_closes_is_refused(monkeypatch):
    """Without the store's mark, other processes would count its writer as dead."""
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


def test_a_read_during_close_returns_the_right_object_or_fails(monkeypatch):
    """A mapping made after the file was closed would be anonymous memory, full of zeros."""
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
                closers[0].join(0.2)  # until the close ends or waits for the reader
            return found

        monkeypatch.setattr(os, "fstat", close_after)
        try:
            value = read(reader, key, 5000)
        except StoreUnavailableError:
            value = None
        closers[0].join()
        assert value in (None, filled(1, 5000).to_bytes())


def test_a_writers_mark_removed_during_a_listing_is_ignored(monkeypatch):
    with opened() as (_, _, url):
        look = Path.iterdir

        def look_at_one_more(path):
            yield from look(path)
            yield path / f"{1:016x}"

        monkeypatch.setattr(Path, "iterdir", look_at_one_more)
        with closing(open_store(url)) as store:
            assert 1 not in store._objects._writers.living()
            assert store._objects._writers.own in store._objects._writers.living()


def test_opening_a_store_does_not_wait_for_a_held_lock():
    (key,) = random_keys(1)
    with opened(timeout_s=0.1) as (store, contents, url):
        put(store, key, 1, 100)
        with (contents.folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            other = open_store(url)
        with closing(other):
            assert other.contains_prefix([key]) == 1


def test_a_store_that_missed_too_many_changes_reads_the_whole_table(monkeypatch):
    kept, gone, passing = random_keys(3)
    with opened() as (store, contents, url), closing(open_store(url)) as other:
        store.put([kept, gone], [filled(1, 100), filled(2, 100)])
        other.delete([gone])
        num_rounds = extent_table._RING // 3 + 1
        for _ in range(num_rounds):
            put(other, passing, 3, 0)
            other.delete([passing])
        assert contents.header.num_changes > extent_table._RING + 4
        assert [store.contains_prefix([key]) for key in (kept, gone, passing)] == [1, 0, 0]
        put(store, gone, 4, 100)
        assert read(other, gone, 100) == filled(4, 100).to_bytes()
        contents.check()


def test_the_store_is_a_private_folder_in_dev_shm():
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


def test_a_store_without_a_name_is_called_default(shared_memory):
    open_store("shm://").close()
    assert (shared_memory / "baton-default").is_dir()


def test_a_folder_that_others_can_use_is_refused(shared_memory):
    (shared_memory / "baton-open").mkdir(mode=0o755)
    (shared_memory / "baton-link").symlink_to(shared_memory)
    for name, advice in (("open", "choose another name"), ("link", "choose another path")):
        with (
            closing(open_store(f"shm://{name}")) as store,
            pytest.raises(StoreUnavailableError, match=advice),
        ):
            store.contains_prefix([])


def test_a_folder_that_appears_just_before_it_is_made_is_refused(shared_memory, monkeypatch):
    make = Path.mkdir

    def make_second(path, *args, **kwargs):
        if path == shared_memory / "baton-raced" and not path.exists():
            make(path)  # as another user would
            path.chmod(0o777)
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", make_second)
    with (
        closing(open_store("shm://raced?max_bytes=1M")) as store,
        pytest.raises(StoreUnavailableError, match="baton-raced is not a private folder"),
    ):
        store.contains_prefix([])
    assert list((shared_memory / "baton-raced").iterdir()) == []


def test_the_error_without_shared_memory_names_an_alternative(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_store, "_SHARED_MEMORY", tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="use file:///path"):
        open_store("shm://x")


def test_fsync_is_refused_for_a_store_in_memory():
    with pytest.raises(ConfigurationError, match="fsync has no meaning in memory"):
        open_store("shm://never-made?fsync=commit")


def test_little_free_memory_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_store, "_SHARED_MEMORY", tmp_path)
    mib = 1 << 20
    usage = shutil._ntuple_diskusage(64 * mib, 50 * mib, 14 * mib)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with (
        closing(open_store("shm://little")) as store,
        pytest.raises(StoreUnavailableError) as raised,
    ):
        store.contains_prefix([])
    for words in (str(tmp_path), "14.0 MiB", "16 MiB", "--shm-size", "max_bytes=", "file:///path"):
        assert words in str(raised.value)
    assert not list(tmp_path.iterdir())
    open_store("shm://little?max_bytes=1MiB").close()
    open_store("shm://little").close()  # the folder exists already


def test_calls_seldom_look_at_the_path_of_the_lock(monkeypatch):
    looked_at, lstat = [], os.lstat
    monkeypatch.setattr(files, "_PATH_CHECK_S", 1000.0)
    monkeypatch.setattr(os, "lstat", lambda path: looked_at.append(path) or lstat(path))
    with opened(max_bytes=1000) as (store, _, _):
        looked_at.clear()
        for key in random_keys(5):
            put(store, key, 1, 100)
            assert store.contains_prefix([key]) == 1
    assert not [path for path in looked_at if str(path).endswith("/lock")]


def test_a_diagnosis_changes_nothing():
    keys = random_keys(11)
    with opened(max_bytes=1000) as (store, contents, url):
        store.put(keys[:10], [filled(1, 100)] * 10)
        with closing(open_store(f"{url}&ttl_s=0.001", is_diagnosis=True)) as diagnosis:
            put(diagnosis, keys[10], 2, 400)
            diagnosis.delete(keys[10:])
        assert contents.objects().keys() == set(keys[:10])
        assert store.contains_prefix(keys[:10]) == 10


def test_a_diagnosis_leaves_no_folder_that_it_has_made(shared_memory):
    with closing(open_store("shm://probed?max_bytes=1MiB", is_diagnosis=True)) as store:
        put(store, random_keys(1)[0], 1, 100)
    assert not list(shared_memory.iterdir())
