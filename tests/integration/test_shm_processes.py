"""The shm store shared by processes, some of which are killed."""

import multiprocessing
import random
import threading
from contextlib import closing

from kvstore.conformance.objects import blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores.shm import extent_table
from kvstore.stores.shm.extent_table import State
from kvstore.stores.shm.mapped_memory import MappedMemory
from tests.support.shm_arena import opened, put

_SPAWN = multiprocessing.get_context("spawn")
_DEADLINE_S = 30


def _write_and_never_finish(url, has_begun):
    """Writes half an object, then waits to be killed."""

    def write_half(memory, places):
        [(start, written)] = places
        memory._mapped(start + 2500)[start : start + 2500] = written.to_bytes()[:2500]
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
            open_store(url).close()  # opening lists the extents
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
        note_changes = extent_table.ExtentTable.note_changes

        def note_and_stop(table, extents):
            note_changes(table, extents)
            has_lock.set()
            threading.Event().wait()

        extent_table.ExtentTable.note_changes = note_and_stop
        store.delete([b"k" * 32])


def test_the_store_recovers_from_a_process_killed_with_the_lock():
    (other,) = random_keys(1)
    with opened() as (store, contents, url):
        store.put([b"k" * 32, other], [filled(1, 5000)] * 2)
        has_lock = _SPAWN.Event()
        killed = _SPAWN.Process(target=_take_the_lock, args=(url, has_lock))
        killed.start()
        try:
            assert has_lock.wait(_DEADLINE_S)
        finally:
            killed.kill()
            killed.join()
        assert contents.header.is_changing
        assert [store.contains_prefix([key]) for key in (b"k" * 32, other)] == [0, 1]
        assert read(store, other, 5000) == filled(1, 5000).to_bytes()
        contents.check()


def test_the_extent_of_a_put_that_outlasts_its_store_is_not_reused(monkeypatch):
    late, new = random_keys(2)
    may_write, write = threading.Event(), MappedMemory.write
    has_begun = threading.Event()

    def write_late(memory, places):
        if any(written.header[0] == 1 for _, written in places):
            has_begun.set()
            assert may_write.wait(_DEADLINE_S)
        write(memory, places)

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
        open_store(url).close()  # opening lists the extents
        put(other, new, 2, 5000)
        may_write.set()
        thread.join()
        assert failed, "a put cannot be committed after the close"
        assert read(other, new, 5000) == filled(2, 5000).to_bytes()
        open_store(url).close()
        assert other.stats().num_bytes == 5000
        contents.check()


_CHURNED_KEYS = [bytes([index]) * 32 for index in range(60)]
_CHURNED_BYTES = 20_000


def _churn(url, seed):
    """Puts, deletes and reads objects, each filled with its key's byte; counts wrong reads."""
    generator = random.Random(seed)
    num_wrong = 0
    with closing(open_store(url)) as store:
        for _ in range(150):
            chosen = generator.sample(range(60), 6)
            keys = [_CHURNED_KEYS[index] for index in chosen]
            values = [filled(index, _CHURNED_BYTES) for index in chosen[:4]]
            store.put(keys[:4], values)
            store.delete(keys[:1])
            found = [blank(_CHURNED_BYTES) for _ in keys]
            statuses = store.get_into(keys, found)
            for status, one, index in zip(statuses, found, chosen, strict=True):
                is_right = one == filled(index, _CHURNED_BYTES)
                num_wrong += status is GetStatus.HIT and not is_right
    return num_wrong


def test_processes_never_read_a_wrong_object_and_share_one_bound():
    max_bytes = 30 * _CHURNED_BYTES
    with opened(max_bytes=max_bytes, timeout_s=30) as (store, contents, url):
        with _SPAWN.Pool(3) as pool:
            jobs = [(url, seed) for seed in range(3)]
            assert pool.starmap_async(_churn, jobs).get(60) == [0, 0, 0]
        contents.check()
        assert not contents.extents(State.WRITTEN_TO)
        assert store.stats().num_bytes == contents.header.object_bytes <= max_bytes
