"""The shm store's files, which serve one object after the other, and never two."""

import multiprocessing
import os
import random
import shutil
import uuid
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvstore.conformance.objects import blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus
from kvstore.stores import file_io, folder_space, object_folder
from tests.support.store_folder import object_path, used_bytes

_SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def recycling(**options):
    """A store in real shared memory, whose files are recycled, and its folder."""
    name = f"test-{uuid.uuid4().hex}"
    query = "&".join(f"{key}={value}" for key, value in {"lease_s": 0, **options}.items())
    url = f"shm://{name}?{query}"
    folder = Path(f"/dev/shm/baton-{name}")
    try:
        with closing(open_store(url)) as store:
            yield store, folder, url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def spare_bytes(folder):
    return sum(file.stat().st_size for file in folder.glob("temporary/*"))


def inode(folder, key):
    return object_path(folder, key).stat().st_ino


def test_a_deleted_objects_file_serves_the_next_of_its_size():
    old, other, new = random_keys(3)
    with recycling() as (store, folder, _):
        store.put_many([old], [filled(1, 100)])
        old_inode = inode(folder, old)
        store.delete([old])
        store.put_many([other, new], [filled(2, 50), filled(3, 100)])
        assert inode(folder, new) == old_inode != inode(folder, other)
        assert read(store, new, 100) == bytes(filled(3, 100))
        assert read(store, old, 100) is GetStatus.MISSING


def test_an_evicted_objects_file_serves_the_next_of_its_size():
    keys = random_keys(30)
    with recycling(max_bytes=1000) as (store, folder, _):
        for index, key in enumerate(keys):
            store.put_many([key], [filled(index, 100)])
            assert used_bytes(folder) <= 1000
        assert len({inode(folder, key) for key in keys[-10:]}) == 10
        assert not spare_bytes(folder)
        assert [read(store, key, 100) for key in keys[-10:]] == [
            bytes(filled(index, 100)) for index in range(20, 30)
        ]


def test_a_file_that_is_read_serves_nobody_else(monkeypatch):
    old, new = random_keys(2)
    with recycling() as (store, folder, _):
        store.put_many([old], [filled(1, 100)])
        old_inode = inode(folder, old)
        first, second = frame = blank(64), blank(36)

        def recycle_then_read(fd, parts):
            store.delete([old])
            store.put_many([new], [filled(2, 100)])
            return file_io.read_all(fd, parts)

        monkeypatch.setattr(object_folder, "read_all", recycle_then_read)
        assert store.get_frames_into([old], [frame]) == [GetStatus.MISSING], "it promises no lease"
        assert bytes(first) + bytes(second) == bytes(filled(1, 100))
        assert inode(folder, new) != old_inode


@pytest.mark.parametrize("num_bytes", [0, 63, 64, 99])
def test_a_file_that_becomes_shorter_while_it_is_read_has_another_size(monkeypatch, num_bytes):
    (key,) = random_keys(1)
    with recycling() as (store, folder, _):
        store.put_many([key], [filled(1, 100)])

        def shorten_then_read(fd, parts):
            os.truncate(object_path(folder, key), num_bytes)
            return file_io.read_all(fd, parts)

        monkeypatch.setattr(object_folder, "read_all", shorten_then_read)
        frame = blank(64), blank(36)
        assert store.get_frames_into([key], [frame]) == [GetStatus.WRONG_SIZE]


@pytest.mark.parametrize("most", [1, 7, 63, 64, 65, 100])
def test_calls_that_move_less_than_was_asked_are_repeated(monkeypatch, most):
    keys = random_keys(2)
    value = memoryview(bytes(range(200)))

    def short(call):
        def call_shortly(fd, parts, *args):
            left, few = most, []
            for part in parts:
                few.append(part[:left])
                left -= len(few[-1])
            return call(fd, few, *args)

        return call_shortly

    with recycling() as (store, _, _):
        for name in ("readv", "pwritev"):
            monkeypatch.setattr(os, name, short(getattr(os, name)))
        store.put_frames(keys[:1], [(value[:64], value[64:])])
        store.put_many(keys[1:], [value])
        for key in keys:
            frame = blank(64), blank(136)
            assert store.get_frames_into([key], [frame]) == [GetStatus.HIT]
            assert b"".join(frame) == value == read(store, key, 200)


def test_a_reader_that_comes_late_finds_nothing_foreign(monkeypatch):
    old, new = random_keys(2)
    with recycling() as (store, folder, _):
        store.put_many([old], [filled(1, 100)])
        old_inode = inode(folder, old)
        hold = folder_space.FolderSpace.hold

        def hold_too_late(space, fd, path):
            store.delete([old])
            store.put_many([new, old], [filled(2, 100), filled(1, 100)])
            return hold(space, fd, path)

        monkeypatch.setattr(folder_space.FolderSpace, "hold", hold_too_late)
        assert read(store, old, 100) is GetStatus.MISSING
        assert inode(folder, new) == old_inode


def test_spare_files_keep_to_an_eighth_and_give_way():
    with recycling(max_bytes=8000) as (store, folder, url):
        keys = random_keys(60)
        store.put_many(keys, [filled(1, 100)] * 60)
        store.delete(keys)
        assert spare_bytes(folder) == 1000
        assert store.stats().num_bytes == 0
        with closing(open_store(url)) as other:
            other.put_many(keys[:1], [filled(2, 7500)])
            assert spare_bytes(folder) == 500
            assert other.stats().num_bytes == 7500


def test_a_dead_writers_file_becomes_a_spare_one():
    with recycling() as (store, folder, url):
        (folder / "temporary" / "dead").write_bytes(b"x" * 1000)
        with closing(open_store(url)) as other:
            assert (spare_bytes(folder), other.stats().num_bytes) == (1000, 0)
            other.put_many(random_keys(1), [filled(1, 1000)])
            assert (spare_bytes(folder), store.stats().num_bytes) == (0, 1000)


_CHURNED_KEYS = [bytes([index]) * 32 for index in range(60)]
_CHURNED_BYTES = 20_000


def _churn_recycled(url, seed):
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


def test_processes_that_recycle_never_read_anothers_bytes():
    max_bytes = 30 * _CHURNED_BYTES
    with recycling(max_bytes=max_bytes, timeout_s=30) as (store, folder, url):
        with _SPAWN.Pool(3) as pool:
            jobs = [(url, seed) for seed in range(3)]
            assert pool.starmap_async(_churn_recycled, jobs).get(60) == [0, 0, 0]
        open_store(url).close()  # lists: files that were being read count as used until then
        assert used_bytes(folder) <= max_bytes
        assert store.stats().num_bytes == used_bytes(folder) - spare_bytes(folder)
