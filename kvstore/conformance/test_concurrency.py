"""Many writers and readers: whole objects, one winner, for threads and processes."""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Barrier

import pytest

from kvstore.conformance.conftest import StoreOpener
from kvstore.conformance.objects import (
    MAX_WRITTEN,
    filled,
    numbered_keys,
    random_keys,
    read_uniform,
    write_and_read,
    write_until_killed,
)
from kvstore.store import KvStore

_OBJECT_BYTES = 300_000
_SPAWN = multiprocessing.get_context("spawn")
_DEADLINE_S = 60.0


@pytest.fixture
def shared_url(store: KvStore, make_url: Callable[..., str]) -> str:
    if not store.capabilities.shared_between_processes:
        pytest.skip("the store is not shared between processes")
    return make_url()


def test_threads_never_see_a_torn_or_changed_object(store: KvStore) -> None:
    num_writers, num_readers = 6, 3
    keys = random_keys(8)
    start = Barrier(num_writers + num_readers)

    def write(byte: int) -> None:
        start.wait()
        for key in keys:
            store.put([key], [filled(byte, _OBJECT_BYTES)])

    def watch() -> list[list[int]]:
        """The values that each key showed, until all have one."""
        start.wait()
        seen: list[list[int]] = [[] for _ in keys]
        deadline_s = time.monotonic() + _DEADLINE_S
        while not all(seen) and time.monotonic() < deadline_s:
            for key, values in zip(keys, seen, strict=True):
                value = read_uniform(store, key, _OBJECT_BYTES)
                values.extend([] if value is None else [value])
        return seen

    with ThreadPoolExecutor(num_writers + num_readers) as pool:
        writes = [pool.submit(write, byte) for byte in range(1, num_writers + 1)]
        watches = [pool.submit(watch) for _ in range(num_readers)]
        for running in writes:
            running.result()
        seen = [running.result() for running in watches]
    for index, key in enumerate(keys):
        final = read_uniform(store, key, _OBJECT_BYTES)
        assert {value for values in seen for value in values[index]} == {final}


def test_threads_delete_and_put_the_same_keys(store: KvStore) -> None:
    keys = random_keys(4)

    def churn(byte: int) -> None:
        for _ in range(15):
            store.put(keys, [filled(byte, 10_000)] * len(keys))
            for key in keys:
                read_uniform(store, key, 10_000)
            assert 0 <= store.contains_prefix(keys) <= len(keys)
            assert 0 <= store.delete(keys) <= len(keys)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(churn, range(6)))
    store.delete(keys)
    store.put(keys, [filled(9, 10_000)] * len(keys))
    assert [read_uniform(store, key, 10_000) for key in keys] == [9] * len(keys)


def test_processes_agree_on_one_winner(store: KvStore, shared_url: str) -> None:
    keys = random_keys(20)
    with _SPAWN.Pool(3) as pool:
        jobs = [(shared_url, keys, byte, _OBJECT_BYTES) for byte in (1, 2, 3)]
        seen = pool.starmap_async(write_and_read, jobs).get(_DEADLINE_S)
    final = [read_uniform(store, key, _OBJECT_BYTES) for key in keys]
    assert None not in final
    assert seen == [final] * 3


def test_a_killed_writer_leaves_whole_objects(store: KvStore, shared_url: str) -> None:
    (seed,) = random_keys(1)
    keys = list(islice(numbered_keys(seed), MAX_WRITTEN + 1))
    writer = _SPAWN.Process(target=write_until_killed, args=(shared_url, seed, _OBJECT_BYTES))
    writer.start()
    deadline_s = time.monotonic() + _DEADLINE_S
    while store.contains_prefix(keys[:3]) < 3:
        assert writer.is_alive(), "the writer failed"
        assert time.monotonic() < deadline_s, "the writer's objects do not appear"
    writer.kill()
    writer.join()
    num_written = store.contains_prefix(keys)
    assert num_written >= 3
    for number, key in enumerate(keys[: num_written + 2]):
        assert read_uniform(store, key, _OBJECT_BYTES) in (number % 256, None)
    store.put([keys[num_written]], [filled(7, 10)])
    store.delete(keys)


def test_objects_outlive_the_store_that_put_them(
    open_kv_store: StoreOpener, shared_url: str
) -> None:
    (key,) = random_keys(1)
    writer = open_kv_store()
    writer.put([key], [filled(5, 100)])
    writer.close()
    assert read_uniform(open_kv_store(), key, 100) == 5
