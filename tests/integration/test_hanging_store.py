"""A store whose calls never return, as on a mount that hangs, delays nothing else."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kvstore import store_connector
from kvstore.conformance.objects import as_object
from kvstore.jobs import LoadJob, LoadResult, LookupJob, LookupResult, SaveJob, SaveResult
from kvstore.layout import KvLayout
from kvstore.mover import io_threads
from kvstore.registry import open_store
from kvstore.store import KvObject
from tests.support.connector_rig import TIMEOUT_S, ConnectorRig, keys
from tests.support.held_copier import HeldCopier

pytestmark = pytest.mark.alone

LAYOUT = KvLayout(num_layers=16, num_kv_heads=8, block_size=64, head_dim=32, dtype="float32")
NUM_SEGMENTS = 8  # each holds one of these blocks


class HangingStore:
    """Holds a store's calls until `is_open` is set, and counts those that hang."""

    def __init__(self, url: str) -> None:
        self.inner = open_store(url)
        self.is_open = threading.Event()
        self.hangs = threading.Semaphore(0)
        self.is_closed = False
        self.capabilities, self.timeout_s = self.inner.capabilities, 0.01
        self.ttl_s, self.lease_s = self.inner.ttl_s, self.inner.lease_s
        self.stats = self.inner.stats
        self.delete = self.inner.delete
        self.get_into = self.inner.get_into

    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        self._hang()
        self.inner.put(keys, objects)

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        self._hang()
        return self.inner.contains_prefix(keys)

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()

    def _hang(self) -> None:
        if not self.is_open.is_set():
            self.hangs.release()
            assert self.is_open.wait(60)


def refused(job_id: int) -> SaveResult:
    return SaveResult(job_id, committed=False, error="unavailable")


@pytest.fixture
def store(tmp_path: Path) -> HangingStore:
    return HangingStore(f"memory://{tmp_path.name}")


@pytest.fixture
def rig(store: HangingStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectorRig]:
    monkeypatch.setattr(io_threads, "_MIN_PATIENCE_S", 0.2)
    rig = ConnectorRig(store, layout=LAYOUT, pool=torch.randn(NUM_SEGMENTS, *LAYOUT.block_shape))
    yield rig
    store.is_open.set()
    rig.worker.close()


def save_jobs(first: int, count: int, num_found: int = 0) -> tuple[SaveJob, ...]:
    return tuple(
        SaveJob(index, keys(1, index), (index % 8,), num_found=num_found)
        for index in range(first, first + count)
    )


def test_saves_that_wait_for_a_thread_fail_until_a_call_ends(
    rig: ConnectorRig, store: HangingStore
) -> None:
    # One thread looks up the block of save 10, and the other puts save 0.
    rig.start(saves=save_jobs(0, NUM_SEGMENTS + 2) + save_jobs(10, 1, num_found=1))
    assert set(rig.results(10)) == {refused(number) for number in range(1, 11)}
    rig.start(saves=save_jobs(20, 1) + save_jobs(21, 1, num_found=1))
    assert {result.job_id for result in rig.results(2)} == {20, 21}, "new saves fail at once"

    store.is_open.set()
    assert rig.results(1) == [SaveResult(0, committed=True)]
    rig.save([1])
    assert rig.load([2]) == LoadResult(1, 1)


def test_loads_that_wait_for_a_thread_fail_until_a_call_ends(
    rig: ConnectorRig, store: HangingStore
) -> None:
    rig.start(saves=save_jobs(0, 2))
    rig.start(loads=(LoadJob(9, keys(1), (3,)),))
    assert rig.results(1) == [LoadResult(9, 0, "unavailable")]
    store.is_open.set()
    rig.results(2)
    assert rig.load([2]) == LoadResult(1, 1)


def test_a_save_that_waits_for_a_thread_keeps_its_blocks_until_they_are_copied(
    store: HangingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_threads, "_MIN_PATIENCE_S", 0.2)
    rig = ConnectorRig(store, HeldCopier)
    copies = rig.worker._mover.copier.copies
    rig.start(saves=save_jobs(0, 3))
    for copy in copies[:2]:
        copy.end()
    assert rig.woken.wait(TIMEOUT_S), "the threads hang"
    assert not rig.worker.poll().saves
    assert copies[2].is_awaited.wait(TIMEOUT_S)
    copies[2].end()
    assert rig.results(1) == [refused(2)]
    store.is_open.set()
    rig.worker.close()


def test_lookups_find_nothing_until_a_call_ends(rig: ConnectorRig, store: HangingStore) -> None:
    rig.start(lookups=(LookupJob(0, keys(1)), LookupJob(1, keys(1))))
    assert set(rig.results(2)) == {
        LookupResult(0, 0, "unavailable"),
        LookupResult(1, 0, "unavailable"),
    }
    rig.start(lookups=(LookupJob(2, keys(1)),))
    assert rig.results(1) == [LookupResult(2, 0, "unavailable")]

    store.is_open.set()
    store.inner.put(keys(1), [as_object(b"x")])
    give_up_at = time.monotonic() + TIMEOUT_S
    for job_id in range(3, 1000):
        rig.start(lookups=(LookupJob(job_id, keys(1)),))
        (result,) = rig.results(1)
        assert result.job_id == job_id, "each lookup has one result"
        if result.num_blocks:
            break
        assert time.monotonic() < give_up_at


def test_a_request_waits_for_a_store_that_hangs_once(
    rig: ConnectorRig, store: HangingStore
) -> None:
    """And not again for its save."""
    rig.start(lookups=(LookupJob(0, keys(1)),))
    assert rig.results(1) == [LookupResult(0, 0, "unavailable")]
    assert store.hangs.acquire(timeout=TIMEOUT_S)
    rig.start(saves=save_jobs(1, 1))
    assert rig.results(1) == [refused(1)]
    assert not store.hangs.acquire(blocking=False), "the store was asked again"


def test_deletes_wait_for_a_lookup_that_hangs(
    rig: ConnectorRig,
    store: HangingStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(store_connector, "_MAX_WAITING_DELETES", 2)
    store.is_open.set()
    rig.save([0, 1, 2])
    store.is_open.clear()
    rig.start(lookups=(LookupJob(0, keys(3)),))
    assert rig.results(1) == [LookupResult(0, 0, "unavailable")], "the lookup hangs"
    for first in (2, 1, 0):
        rig.start(deletes=keys(1, first))
    (record,) = [record for record in caplog.records if "not deleted" in record.message]
    assert record.message == "KV store: 1 blocks are not deleted: too many wait"

    has_deleted = threading.Event()
    rig.worker._lookups.submit(has_deleted.set)
    store.is_open.set()
    assert has_deleted.wait(TIMEOUT_S)
    assert rig.load([3, 4, 5]).num_blocks == 1, "only the delete beyond the limit was not made"


def test_close_logs_deletes_that_have_not_begun(
    rig: ConnectorRig, store: HangingStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig.start(lookups=(LookupJob(0, keys(1)),), deletes=keys(3))
    assert store.hangs.acquire(timeout=TIMEOUT_S)
    rig.worker.close()
    assert "3 blocks are not deleted: it is closed" in caplog.text


def test_close_does_not_wait_for_calls_that_hang(rig: ConnectorRig, store: HangingStore) -> None:
    rig.start(saves=save_jobs(0, 4), loads=(LoadJob(9, keys(1), (1,)),))
    rig.start(lookups=(LookupJob(10, keys(1)),))
    for _ in range(3):
        assert store.hangs.acquire(timeout=TIMEOUT_S)
    began_at = time.monotonic()
    rig.worker.close()
    assert time.monotonic() - began_at < TIMEOUT_S / 2
    assert not store.is_closed, "the calls may still use the open store"

    store.is_open.set()
    give_up_at = time.monotonic() + TIMEOUT_S
    while not store.is_closed:
        assert time.monotonic() < give_up_at
        threading.Event().wait(0.01)
        rig.worker.close()
