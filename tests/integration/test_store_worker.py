"""The store connector's worker on real tensors: bytes, faults, cancels and bounds."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.codec import HEADER_BYTES
from kvstore.conformance.objects import as_object, blank
from kvstore.handoff import KvHandoff
from kvstore.jobs import LoadJob, LoadResult, LookupJob, LookupResult, SaveJob, SaveResult
from kvstore.registry import open_store
from kvstore.store import GetStatus, KvObject, KvStore, StoreUnavailableError
from kvstore.store_connector import StoreConnectorWorker
from tests.support.connector_rig import LAYOUT, TIMEOUT_S, ConnectorRig, keys
from tests.support.held_copier import StagedCopier


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[[KvStore | None], ConnectorRig]]:
    rigs: list[ConnectorRig] = []

    def make(store: KvStore | None = None, **options: Any) -> ConnectorRig:
        if isinstance(
            store, FaultyStore
        ):  # its fault may change the bytes that a call has read, so staging keeps them
            options = {"copier_of": StagedCopier, **options}
        rigs.append(ConnectorRig(store or open_store(f"memory://{tmp_path.name}"), **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.worker.close()


def test_saved_blocks_are_loaded_unchanged(make_rig: Callable[..., ConnectorRig]) -> None:
    rig = make_rig()
    rig.save(range(10, 30))

    assert rig.load(range(40, 60)) == LoadResult(1, 20)
    assert torch.equal(rig.pool[40:60], rig.pool[10:30])


def test_only_the_valid_tokens_of_a_partial_tail_are_saved(
    make_rig: Callable[..., ConnectorRig],
) -> None:
    rig = make_rig()
    rig.save([1, 2], num_tail_tokens=3)
    rig.load([11, 12])

    assert torch.equal(rig.pool[11], rig.pool[1])
    assert torch.equal(rig.pool[12, ..., :3, :], rig.pool[2, ..., :3, :])
    assert not rig.pool[12, ..., 3:, :].any()


def test_all_jobs_end_when_there_are_more_than_staging_holds(
    make_rig: Callable[..., ConnectorRig],
) -> None:
    rig = make_rig()
    jobs = tuple(SaveJob(i, keys(8, 8 * i), tuple(range(8))) for i in range(50))
    rig.start(saves=jobs)

    results = rig.results(len(jobs))

    assert {result.job_id for result in results} == set(range(50))
    assert all(result.committed for result in results)


def test_a_missing_block_ends_the_prefix(make_rig: Callable[..., ConnectorRig]) -> None:
    rig = make_rig()
    rig.save(range(4))
    rig.store.delete(keys(1, 2))
    before = rig.pool.clone()

    assert rig.load(range(20, 24)) == LoadResult(1, 2, "missing")
    assert torch.equal(rig.pool[20:22], before[:2])
    assert torch.equal(rig.pool[24:], before[24:])


class FaultyStore(KvStore):
    """Delegates to a store; `fault` gets the objects of a read, and may change them or fail."""

    def __init__(self, store: KvStore, fault: Callable[[list[KvObject]], None]) -> None:
        self._store, self._fault = store, fault
        self.capabilities = store.capabilities
        self.ttl_s = store.ttl_s
        self.num_calls = 0

    @classmethod
    def from_url(cls, url: str) -> "FaultyStore":
        return cls(open_store(url), lambda objects: None)

    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        self.num_calls += 1
        self._fault([])
        self._store.put(keys, objects)

    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        self.num_calls += 1
        statuses = self._store.get_into(keys, objects)
        self._fault(list(objects))
        return statuses

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        self.num_calls += 1
        self._fault([])
        return self._store.contains_prefix(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._store.delete(keys)

    def stats(self) -> object:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()


def flip(corrupt_object: KvObject, byte: int) -> None:
    value = bytearray(corrupt_object.to_bytes())
    value[byte] ^= 1
    corrupt_object.fill(value)


@pytest.mark.parametrize("byte", [0, HEADER_BYTES - 1, HEADER_BYTES, -1])
def test_a_block_with_a_flipped_bit_is_never_written_to_the_pool(
    make_rig: Callable[..., ConnectorRig], byte: int, tmp_path: Path
) -> None:
    def corrupt(objects: list[KvObject]) -> None:
        if len(objects) > 2:
            flip(objects[2], byte)

    store = FaultyStore(open_store(f"memory://{tmp_path.name}"), corrupt)
    rig = make_rig(store)
    rig.save(range(4))
    before = rig.pool.clone()

    assert rig.load(range(20, 24)) == LoadResult(1, 2, "corrupt")
    assert torch.equal(rig.pool[22:], before[22:])
    assert store.contains_prefix(keys(4)) == 2, "the corrupt object is deleted"


def test_an_object_under_a_foreign_key_is_refused(make_rig: Callable[..., ConnectorRig]) -> None:
    rig = make_rig()
    rig.save([3])
    stolen = blank(HEADER_BYTES + LAYOUT.block_bytes)
    rig.store.get_into(keys(1), [stolen])
    rig.store.put(keys(1, 7), [stolen])

    assert rig.load([9], first_key=7) == LoadResult(1, 0, "corrupt")


def test_an_object_of_another_size_is_refused(make_rig: Callable[..., ConnectorRig]) -> None:
    rig = make_rig()
    rig.store.put(keys(1), [blank(100)])

    assert rig.load([9]) == LoadResult(1, 0, "corrupt")


def test_a_cancelled_load_writes_nothing(
    make_rig: Callable[..., ConnectorRig], tmp_path: Path
) -> None:
    reading, may_continue = threading.Event(), threading.Event()

    def wait(objects: list[KvObject]) -> None:
        if objects:
            reading.set()
            may_continue.wait(TIMEOUT_S)

    rig = make_rig(FaultyStore(open_store(f"memory://{tmp_path.name}"), wait))
    rig.save(range(4))
    before = rig.pool.clone()
    rig.start(loads=(LoadJob(1, keys(4), (20, 21, 22, 23)),))
    assert reading.wait(TIMEOUT_S)
    rig.start(cancelled_loads=(1,))
    assert not rig.worker.poll(), "the job ends only after its I/O"
    may_continue.set()

    (result,) = rig.results(1)

    assert result == LoadResult(1, 0, "cancelled")
    assert torch.equal(rig.pool, before)


def test_a_load_cancelled_while_it_is_queued_is_not_fetched(
    make_rig: Callable[..., ConnectorRig], tmp_path: Path
) -> None:
    reading, may_continue = threading.Semaphore(0), threading.Event()

    def wait(objects: list[KvObject]) -> None:
        reading.release()
        may_continue.wait(TIMEOUT_S)

    store = FaultyStore(open_store(f"memory://{tmp_path.name}"), wait)
    rig = make_rig(store)
    rig.start(loads=tuple(LoadJob(index, keys(1), (index,)) for index in range(4)))
    for _ in range(2):  # one load in each thread
        assert reading.acquire(timeout=TIMEOUT_S)
    rig.start(cancelled_loads=(2, 3))
    may_continue.set()

    results = {result.job_id: result for result in rig.results(4)}
    assert {results[2], results[3]} == {
        LoadResult(2, 0, "cancelled"),
        LoadResult(3, 0, "cancelled"),
    }
    assert store.num_calls == 2


def test_an_outage_fails_jobs_and_trips_the_breaker(
    make_rig: Callable[..., ConnectorRig], tmp_path: Path
) -> None:
    def refuse(objects: list[KvObject]) -> None:
        raise StoreUnavailableError("down")

    store = FaultyStore(open_store(f"memory://{tmp_path.name}"), refuse)
    rig = make_rig(store)
    rig.start(
        lookups=(LookupJob(200, keys(2)),),
        saves=tuple(SaveJob(i, keys(1, i), (i,)) for i in range(20)),
        loads=(LoadJob(100, keys(2), (1, 2)),),
    )

    results = rig.results(22)

    assert LookupResult(200, 0, "unavailable") in results
    assert LoadResult(100, 0, "unavailable") in results
    assert all(not r.committed for r in results if isinstance(r, SaveResult))
    assert store.num_calls <= 4, (
        "each thread calls the failing store once to read and once to write"
    )


def test_the_breaker_probes_again_after_its_cooldown(tmp_path: Path) -> None:
    now, is_down = [0.0], [True]

    def maybe_refuse(objects: list[KvObject]) -> None:
        if is_down[0]:
            raise StoreUnavailableError("down")

    store = FaultyStore(open_store(f"memory://{tmp_path.name}"), maybe_refuse)
    breaker = StoreConnectorWorker(store, clock=lambda: now[0])
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            breaker.num_held(keys(1))
    assert store.num_calls == 1

    now[0], is_down[0] = 2.0, False
    assert breaker.num_held(keys(1)) == 0
    assert breaker.num_held(keys(1)) == 0
    breaker.close()


def test_only_one_call_probes_a_store_that_was_down(tmp_path: Path) -> None:
    now, probing, may_continue = [0.0], threading.Event(), threading.Event()

    def hang(objects: list[KvObject]) -> None:
        probing.set()
        may_continue.wait(TIMEOUT_S)
        raise StoreUnavailableError("down")

    store = FaultyStore(open_store(f"memory://{tmp_path.name}"), hang)
    breaker = StoreConnectorWorker(store, clock=lambda: now[0])
    may_continue.set()
    with pytest.raises(StoreUnavailableError):
        breaker.num_held(keys(1))
    may_continue.clear()
    probing.clear()
    now[0] = 2.0
    with ThreadPoolExecutor(1) as executor:
        probe = executor.submit(breaker.num_held, keys(1))
        assert probing.wait(TIMEOUT_S)
        for _ in range(5):
            with pytest.raises(StoreUnavailableError, match="a moment ago"):
                breaker.num_held(keys(1))
        may_continue.set()
        assert isinstance(probe.exception(TIMEOUT_S), StoreUnavailableError)
    assert store.num_calls == 2


def test_lookups_continue_on_a_store_that_refuses_puts(tmp_path: Path) -> None:
    class FullStore(FaultyStore):
        def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
            raise StoreUnavailableError("full")

    inner = open_store(f"memory://{tmp_path.name}")
    inner.put(keys(1), [as_object(b"x")])
    breaker = StoreConnectorWorker(FullStore(inner, lambda objects: None))
    with pytest.raises(StoreUnavailableError):
        breaker.put(SaveJob(1, keys(1), (0,)), keys(1), [as_object(b"x")])

    assert breaker.num_held(keys(1)) == 1


def test_a_cancelled_lookup_is_not_made(
    make_rig: Callable[..., ConnectorRig], tmp_path: Path
) -> None:
    entered, may_continue = threading.Event(), threading.Event()

    def wait(objects: list[KvObject]) -> None:
        entered.set()
        may_continue.wait(TIMEOUT_S)

    store = FaultyStore(open_store(f"memory://{tmp_path.name}"), wait)
    rig = make_rig(store)
    rig.start(lookups=tuple(LookupJob(index, keys(1)) for index in range(3)))
    assert entered.wait(TIMEOUT_S)
    rig.start(cancelled_lookups=(1,))
    may_continue.set()

    assert {result.job_id for result in rig.results(2)} == {0, 2}
    assert store.num_calls <= 2


def test_the_cooldown_grows_while_a_store_times_out(
    make_rig: Callable[..., ConnectorRig], tmp_path: Path
) -> None:
    now = [0.0]

    def time_out(objects: list[KvObject]) -> None:
        raise StoreUnavailableError("not answered in time")

    store = FaultyStore(open_store(f"memory://{tmp_path.name}"), time_out)
    rig = make_rig(store, clock=lambda: now[0])
    calls = []
    for now[0] in (0.0, 1.0, 2.0, 3.0):
        before = store.num_calls
        for _ in range(3):
            assert rig.load([1]) == LoadResult(1, 0, "unavailable")
        calls.append(store.num_calls - before)
    assert calls == [1, 1, 0, 1], "a failed probe makes the next cooldown longer"


def test_a_full_store_evicts_objects_of_waiting_requests_last(
    make_rig: Callable[..., ConnectorRig], tmp_path: Path
) -> None:
    object_bytes, now = HEADER_BYTES + LAYOUT.block_bytes, [0.0]
    url = f"memory://{tmp_path.name}?lease_s=0&max_bytes={4 * object_bytes}"
    store = FaultyStore(open_store(url), lambda objects: None)
    rig = make_rig(store, clock=lambda: now[0])
    waiting = KvHandoff("h", b"n", keys(2), 8, "memory", "xxh3-128", 1000)
    rig.save([1, 2])
    rig.start(kept=(waiting, waiting))
    rig.save([3, 4], first_key=2)

    now[0] = 10.0
    rig.worker.poll()
    rig.start(lookups=(LookupJob(9, keys(1, 50)),))
    rig.results(1)  # one thread touches and looks up, in this order
    rig.save([5], first_key=4)
    assert store.contains_prefix(keys(2)) == 2
    assert store.contains_prefix(keys(1, 2)) == 0

    rig.start(dropped=("h", "h"))
    now[0] = 30.0
    num_calls = store.num_calls
    rig.worker.poll()
    assert not rig.worker._is_touching
    assert store.num_calls == num_calls


class FailingStore(FaultyStore):
    """Refuses every put, and every delete unless `deletes`."""

    def __init__(self, store: KvStore, *, deletes: bool) -> None:
        super().__init__(store, lambda objects: None)
        self._deletes = deletes

    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        raise StoreUnavailableError("full of leased objects")

    def delete(self, keys: Sequence[bytes]) -> int:
        if not self._deletes:
            raise StoreUnavailableError("no answer")
        return super().delete(keys)


def test_an_object_of_another_format_is_refused_with_both_versions(
    make_rig: Callable[..., ConnectorRig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = open_store(f"memory://{tmp_path.name}")
    make_rig(inner).save(range(4))
    newer = blank(HEADER_BYTES + LAYOUT.block_bytes)
    newer.header[:] = b"BATONKV\0" + (7).to_bytes(2, "little") + bytes(HEADER_BYTES - 10)
    inner.delete(keys(1, 2))
    inner.put(keys(1, 2), [newer])
    reason = "corrupt: object format version: this replica has 1, the object 7"
    assert make_rig(inner).load(range(10, 14)) == LoadResult(1, 2, reason)
    assert f"{keys(1, 2)[0].hex()} is {reason}" in caplog.text


@pytest.mark.parametrize("deletes", [True, False])
def test_a_corrupt_object_is_logged_and_deleted_if_possible(
    make_rig: Callable[..., ConnectorRig],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    deletes: bool,
) -> None:
    caplog.set_level(logging.DEBUG, "baton.kvstore")
    inner = open_store(f"memory://{tmp_path.name}")
    make_rig(inner).save(range(4))
    corrupt_object = blank(HEADER_BYTES + LAYOUT.block_bytes)
    inner.delete(keys(1, 2))
    inner.put(keys(1, 2), [corrupt_object])
    rig = make_rig(FailingStore(inner, deletes=deletes))
    rig.start(saves=(SaveJob(7, keys(1, 9), (9,)),))
    assert rig.results(1) == [SaveResult(7, committed=False, error="unavailable")]

    assert rig.load(range(10, 14)) == LoadResult(1, 2, "corrupt")
    assert f"{keys(1, 2)[0].hex()} is corrupt" in caplog.text
    assert ("stays: no answer" in caplog.text) is not deletes
    assert inner.contains_prefix(keys(1, 2)) == (not deletes)
