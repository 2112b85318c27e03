"""Saves and loads that move bytes straight between a host's pool and a store."""

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from kvstore.codec import HEADER_BYTES, seal
from kvstore.conformance.objects import as_object, blank
from kvstore.faults import FAULTS, FaultPlan, FaultyBackend
from kvstore.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from kvstore.layout import KvLayout
from kvstore.mover import io_threads
from kvstore.mover import mover as staged_mover
from kvstore.mover.staging import StagingBuffers
from kvstore.registry import open_store
from kvstore.store import GetStatus, KvObject, KvStore, StoreUnavailableError
from tests.support.connector_rig import TIMEOUT_S, ConnectorRig, keys

LAYOUT = KvLayout(num_layers=4, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
PIECE = staged_mover._LEAST_PIECE_BYTES // LAYOUT.block_bytes  # 16 blocks
NUM_BLOCKS = 3 * PIECE + 3
SLOT_BYTES = HEADER_BYTES + LAYOUT.block_bytes


@pytest.fixture(params=["memory", "shm", "file"])
def store(request: pytest.FixtureRequest, tmp_path) -> Iterator[KvStore]:
    name = f"test-{uuid.uuid4().hex}"
    place = f"{tmp_path}/kv" if request.param == "file" else name
    store = open_store(f"{request.param}://{place}?max_bytes=256MiB")
    yield store
    store.close()
    shutil.rmtree(f"/dev/shm/baton-{name}", ignore_errors=True)


@pytest.fixture
def memory_store(tmp_path) -> Iterator[KvStore]:
    store = open_store(f"memory://{tmp_path.name}")
    yield store
    store.close()


def random_pool() -> torch.Tensor:
    return torch.randn(NUM_BLOCKS, *LAYOUT.block_shape).to(torch.bfloat16)


@pytest.fixture
def make_rig() -> Iterator[Callable[[KvStore], ConnectorRig]]:
    rigs: list[ConnectorRig] = []

    def make(store: KvStore) -> ConnectorRig:
        rigs.append(ConnectorRig(store, pool=random_pool(), layout=LAYOUT))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.worker.close()


@pytest.fixture
def rig(make_rig: Callable[[KvStore], ConnectorRig], store: KvStore) -> ConnectorRig:
    return make_rig(store)


@pytest.fixture
def no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(staging: StagingBuffers) -> None:
        pytest.fail("a segment was taken")

    monkeypatch.setattr(StagingBuffers, "take", refuse)


class HeldReads:
    """Holds a store's reads until `go_on`; counts those that have begun."""

    def __init__(self, store: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._read = store.get_into
        self.num_begun = threading.Semaphore(0)
        self.num_calls = 0
        self.go_on = threading.Event()
        monkeypatch.setattr(store, "get_into", self.get_into)

    def get_into(self, keys: Sequence[bytes], frames: Sequence[KvObject]) -> list[GetStatus]:
        self.num_calls += 1
        self.num_begun.release()
        assert self.go_on.wait(TIMEOUT_S)
        return self._read(keys, frames)

    def await_calls(self, count: int) -> None:
        for _ in range(count):
            assert self.num_begun.acquire(timeout=TIMEOUT_S)


def replace_object(
    store: KvStore, key: bytes, sealed_for: bytes | None, num_bytes: int = SLOT_BYTES
) -> None:
    new = as_object(bytearray(b"\xff" * num_bytes))  # as a number: not one
    if sealed_for is not None:
        seal([new], [sealed_for])
    store.delete([key])
    store.put([key], [new])


@pytest.mark.usefixtures("no_segments")
@pytest.mark.parametrize("count", [1, PIECE, PIECE + 1, NUM_BLOCKS // 2])
def test_blocks_come_back_as_they_were(rig: ConnectorRig, count: int) -> None:
    before = rig.pool.clone()
    rig.save(range(count))
    assert torch.equal(rig.pool, before)

    blocks = list(range(NUM_BLOCKS - 1, NUM_BLOCKS - 1 - count, -1))
    assert rig.load(blocks) == LoadResult(1, count)
    assert torch.equal(rig.pool[blocks], before[:count])
    rest = NUM_BLOCKS - count
    assert torch.equal(rig.pool[:rest], before[:rest])


def test_what_is_put_in_place_is_what_segments_would_put(
    rig: ConnectorRig, make_rig: Callable[[KvStore], ConnectorRig], memory_store: KvStore
) -> None:
    """Also for pools of other forms."""
    rig.save(range(2))
    objects = [blank(SLOT_BYTES) for _ in range(2)]
    assert rig.store.get_into(keys(2), objects) == [GetStatus.HIT] * 2
    for found, block in zip(objects, rig.pool, strict=False):
        assert found.payload == block.view(torch.uint8).numpy().tobytes()
    other = make_rig(memory_store)
    memory_store.put(keys(2), objects)
    assert other.load(range(2)) == LoadResult(1, 2)
    assert torch.equal(other.pool[:2], rig.pool[:2])


@pytest.mark.usefixtures("no_segments")
def test_a_missing_block_ends_the_prefix(rig: ConnectorRig) -> None:
    rig.save(range(6))
    rig.store.delete(keys(1, 2))
    before = rig.pool.clone()

    assert rig.load(range(20, 26)) == LoadResult(1, 2, "missing")
    assert torch.equal(rig.pool[20:22], before[:2])
    assert not rig.pool[22:26].any(), "what was not verified does not stay"
    assert torch.equal(rig.pool[26:], before[26:])


@pytest.mark.usefixtures("no_segments")
@pytest.mark.parametrize(
    ("num_bytes", "sealed_for"),
    [
        (SLOT_BYTES, b"f" * 32),
        (SLOT_BYTES, None),
        (SLOT_BYTES - 1, keys(1, 1)[0]),
        (SLOT_BYTES + 1, keys(1, 1)[0]),
        (10, None),
    ],
    ids=["foreign", "unsealed", "shorter", "longer", "no header"],
)
def test_what_is_not_this_block_is_zeroed(
    rig: ConnectorRig, num_bytes: int, sealed_for: bytes | None
) -> None:
    rig.save(range(3))
    (wrong,) = keys(1, 1)
    replace_object(rig.store, wrong, sealed_for, num_bytes)
    before = rig.pool.clone()

    assert rig.load([10, 11, 12]) == LoadResult(1, 1, "corrupt")
    assert torch.equal(rig.pool[10], before[0])
    assert not rig.pool[11:13].any()
    assert torch.equal(rig.pool[13:], before[13:])
    assert rig.store.contains_prefix([wrong]) == 0


def test_what_a_failed_call_left_is_zeroed(
    make_rig: Callable[[KvStore], ConnectorRig],
    memory_store: KvStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_half_way(keys: Sequence[bytes], frames: Sequence[KvObject]) -> list[GetStatus]:
        frames[0].payload[:100] = b"\xff" * 100
        raise StoreUnavailableError("broken")

    rig = make_rig(memory_store)
    before = rig.pool.clone()
    monkeypatch.setattr(memory_store, "get_into", fail_half_way)
    assert rig.load([10, 11]) == LoadResult(1, 0, "unavailable")
    assert not rig.pool[10:12].any()
    assert torch.equal(rig.pool[12:], before[12:])


def test_a_cancelled_load_begins_no_further_call(
    make_rig: Callable[[KvStore], ConnectorRig],
    memory_store: KvStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_rig(memory_store)
    before = rig.pool.clone()
    held = HeldReads(memory_store, monkeypatch)
    rig.start(loads=(LoadJob(1, keys(NUM_BLOCKS), tuple(range(NUM_BLOCKS))),))
    held.await_calls(2)
    rig.start(cancelled_loads=(1,))
    assert not rig.worker.poll(), "the job ends when its calls have"
    held.go_on.set()

    assert rig.results(1) == [LoadResult(1, 0, "cancelled")]
    assert held.num_calls == 2
    assert torch.equal(rig.pool[2 * PIECE :], before[2 * PIECE :])


def test_a_load_that_is_cancelled_in_its_last_call_may_be_whole(
    make_rig: Callable[[KvStore], ConnectorRig],
    memory_store: KvStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_rig(memory_store)
    rig.save(range(4))
    held = HeldReads(memory_store, monkeypatch)
    rig.start(loads=(LoadJob(1, keys(4), (10, 11, 12, 13)),))
    held.await_calls(1)
    rig.start(cancelled_loads=(1,))
    held.go_on.set()

    assert rig.results(1) == [LoadResult(1, 4)]
    assert torch.equal(rig.pool[10:14], rig.pool[:4])


def test_a_call_that_hangs_keeps_its_job_open(
    make_rig: Callable[[KvStore], ConnectorRig],
    memory_store: KvStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(io_threads, "_PATIENCE", 0)
    monkeypatch.setattr(io_threads, "_LEAST_PATIENCE_S", 0.2)
    rig = make_rig(memory_store)
    rig.save(range(8))
    held = HeldReads(memory_store, monkeypatch)
    rig.start(loads=tuple(LoadJob(job, keys(4), range(10 * job, 10 * job + 4)) for job in (1, 2)))
    held.await_calls(2)
    rig.start(cancelled_loads=(1,), loads=(LoadJob(3, keys(4), range(30, 34)),))
    assert rig.results(1) == [LoadResult(3, 0, "unavailable")], "no thread is left for it"
    assert not rig.worker.poll()

    held.go_on.set()
    assert {result.job_id for result in rig.results(2)} == {1, 2}
    assert torch.equal(rig.pool[20:24], rig.pool[:4])


def poll_when_woken(rig: ConnectorRig, wakes: threading.Semaphore, num_results: int) -> list:
    """As an engine does that has nothing else to do: polls only when it is woken."""
    found: list[LoadResult] = []
    while len(found) < num_results:
        assert wakes.acquire(timeout=TIMEOUT_S), "nobody says that there is news"
        found += rig.worker.poll().loads
    return found


def test_the_engine_is_woken_once_for_all_pieces(
    make_rig: Callable[[KvStore], ConnectorRig], memory_store: KvStore
) -> None:
    rig, wakes = make_rig(memory_store), threading.Semaphore(0)
    rig.save(range(NUM_BLOCKS))
    rig.worker.set_waker(wakes.release)
    rig.start(loads=(LoadJob(1, keys(NUM_BLOCKS), tuple(range(NUM_BLOCKS))),))
    assert poll_when_woken(rig, wakes, 1) == [LoadResult(1, NUM_BLOCKS)]
    assert not wakes.acquire(blocking=False)


def test_a_call_that_ends_after_the_others_were_given_up_is_told(
    make_rig: Callable[[KvStore], ConnectorRig],
    memory_store: KvStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(io_threads, "_PATIENCE", 0)
    monkeypatch.setattr(io_threads, "_LEAST_PATIENCE_S", 0.2)
    rig, wakes = make_rig(memory_store), threading.Semaphore(0)
    rig.save(range(NUM_BLOCKS))
    held = HeldReads(memory_store, monkeypatch)
    rig.worker.set_waker(wakes.release)
    rig.start(loads=(LoadJob(1, keys(NUM_BLOCKS), tuple(range(NUM_BLOCKS))),))
    assert wakes.acquire(timeout=TIMEOUT_S), "the threads hang"
    assert not rig.worker.poll(), "two pieces are given up, two are in calls"
    held.go_on.set()
    (result,) = poll_when_woken(rig, wakes, 1)
    assert result == LoadResult(1, 2 * PIECE, "unavailable")


def test_a_tail_leaves_by_a_segment_and_the_pool_keeps_it(rig: ConnectorRig) -> None:
    before = rig.pool.clone()
    rig.save([1, 2], num_tail_tokens=3)
    assert torch.equal(rig.pool, before)

    assert rig.load([11, 12]) == LoadResult(1, 2)
    assert torch.equal(rig.pool[11], before[1])
    assert torch.equal(rig.pool[12, ..., :3, :], before[2, ..., :3, :])
    assert not rig.pool[12, ..., 3:, :].any(), "what lies behind a tail stays in the process"


@pytest.mark.usefixtures("no_segments")
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "delay"])
def test_faults_change_no_pool_that_is_saved(
    make_rig: Callable[[KvStore], ConnectorRig], memory_store: KvStore, fault: str
) -> None:
    rig = make_rig(memory_store)
    rig.worker.wrap_backend(lambda inner: FaultyBackend(inner, FaultPlan({fault: 0.5})))
    before = rig.pool.clone()
    rig.save(range(20))
    assert torch.equal(rig.pool, before)

    for _ in range(3):
        result = rig.load(range(20, 40))
        good = 20 + result.num_blocks
        assert torch.equal(rig.pool[20:good], before[: result.num_blocks])
        # Later pieces may be good; of the others there is nothing.
        for block, saved, old in zip(
            rig.pool[good:40], before[good - 20 :], before[good:40], strict=False
        ):
            assert not block.any() or torch.equal(block, saved) or torch.equal(block, old)
    assert torch.equal(rig.pool[:20], before[:20])


@pytest.mark.usefixtures("no_segments")
def test_a_save_of_which_a_part_cannot_be_put_is_not_committed(
    make_rig: Callable[[KvStore], ConnectorRig],
    memory_store: KvStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = memory_store.put
    is_first_put = threading.Event()

    def refuse_some(keys: Sequence[bytes], frames: Sequence[KvObject]) -> None:
        if keys[0] == refused:
            assert is_first_put.wait(TIMEOUT_S)
            raise StoreUnavailableError("full")
        put(keys, frames)
        if keys[0] == first:
            is_first_put.set()

    (first,), (refused,) = keys(1), keys(1, PIECE)
    rig = make_rig(memory_store)
    monkeypatch.setattr(memory_store, "put", refuse_some)
    rig.start(saves=(SaveJob(5, keys(NUM_BLOCKS), tuple(range(NUM_BLOCKS))),))
    assert rig.results(1) == [SaveResult(5, committed=False, error="unavailable")]
    assert memory_store.contains_prefix(keys(NUM_BLOCKS)) == PIECE


class FailingPuts:
    """A backend whose puts fail when `fail` is released; counts those that have begun."""

    def __init__(self) -> None:
        self.begun, self.fail = threading.Semaphore(0), threading.Semaphore(0)

    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[KvObject]) -> None:
        self.begun.release()
        assert self.fail.acquire(timeout=TIMEOUT_S)
        raise StoreUnavailableError("full")


@pytest.mark.usefixtures("no_segments")
def test_a_save_that_has_failed_begins_no_further_call(
    make_rig: Callable[[KvStore], ConnectorRig], memory_store: KvStore
) -> None:
    rig, puts = make_rig(memory_store), FailingPuts()
    rig.worker.wrap_backend(lambda inner: puts)
    rig.start(saves=(SaveJob(5, keys(NUM_BLOCKS), tuple(range(NUM_BLOCKS))),))  # in four pieces
    puts.fail.release()
    for _ in range(3):
        assert puts.begun.acquire(timeout=TIMEOUT_S)
    assert not rig.worker.poll(), "two calls are under way"
    puts.fail.release(2)

    assert rig.results(1) == [SaveResult(5, committed=False, error="unavailable")]
    assert not puts.begun.acquire(blocking=False)
