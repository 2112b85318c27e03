"""Saves and loads that copy bytes directly between a host's pool and a store."""

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
from kvstore.mover import io_threads, mover
from kvstore.mover.staging import StagingBuffers
from kvstore.registry import open_store
from kvstore.store import GetStatus, KvObject, KvStore, StoreUnavailableError
from tests.support.connector_rig import TIMEOUT_S, ConnectorRig, keys

LAYOUT = KvLayout(num_layers=4, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
PIECE = mover._MIN_PIECE_BYTES // LAYOUT.block_bytes  # 16 blocks
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
    """Holds a store's reads until `may_continue` is set; counts those that have begun."""

    def __init__(self, store: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._read = store.get_into
        self.num_begun = threading.Semaphore(0)
        self.num_calls = 0
        self.may_continue = threading.Event()
        monkeypatch.setattr(store, "get_into", self.get_into)

    def get_into(self, keys: Sequence[bytes], frames: Sequence[KvObject]) -> list[GetStatus]:
        self.num_calls += 1
        self.num_begun.release()
        assert self.may_continue.wait(TIMEOUT_S)
        return self._read(keys, frames)

    def await_calls(self, count: int) -> None:
        for _ in range(count):
            assert self.num_begun.acquire(timeout=TIMEOUT_S)


def replace_object(
    store: KvStore, key: bytes, sealed_for: bytes | None, num_bytes: int = SLOT_BYTES
) -> None:
    new = as_object(bytearray(b"\xff" * num_bytes))  # NaN in bfloat16
    if sealed_for is not None:
        seal([new], [sealed_for])
    store.delete([key])
    store.put([key], [new])


@pytest.mark.usefixtures("no_segments")
@pytest.mark.parametrize("count", [1, PIECE, PIECE + 1, NUM_BLOCKS // 2])
def test_saved_blocks_are_loaded_unchanged(rig: ConnectorRig, count: int) -> None:
    before = rig.pool.clone()
    rig.save(range(count))
    assert torch.equal(rig.pool, before)

    blocks = list(range(NUM_BLOCKS - 1, NUM_BLOCKS - 1 - count, -1))
    assert rig.load(blocks) == LoadResult(1, count)
    assert torch.equal(rig.pool[blocks], before[:count])
    rest = NUM_BLOCKS - count
    assert torch.equal(rig.pool[:rest], before[:rest])


def test_objects_saved_in_place_are_the_pools_bytes_and_load_elsewhere(
    rig: ConnectorRig, make_rig: Callable[[KvStore], ConnectorRig], memory_store: KvStore
) -> None:
    """A rig on another store loads copies of the objects."""
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
    assert not rig.pool[22:26].any(), "blocks that were not verified are zeroed"
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
def test_a_block_read_from_a_wrong_object_is_zeroed(
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


def test_blocks_that_a_failed_read_wrote_are_zeroed(
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


def test_a_cancelled_load_starts_no_further_reads(
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
    assert not rig.worker.poll(), "the job ends only after its reads"
    held.may_continue.set()

    assert rig.results(1) == [LoadResult(1, 0, "cancelled")]
    assert held.num_calls == 2
    assert torch.equal(rig.pool[2 * PIECE :], before[2 * PIECE :])


def test_a_load_cancelled_during_its_last_read_may_be_complete(
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
    held.may_continue.set()

    assert rig.results(1) == [LoadResult(1, 4)]
    assert torch.equal(rig.pool[10:14], rig.pool[:4])


def test_a_read_that_hangs_keeps_its_job_open(
    make_rig: Callable[[KvStore], ConnectorRig],
    memory_store: KvStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(io_threads, "_PATIENCE", 0)
    monkeypatch.setattr(io_threads, "_MIN_PATIENCE_S", 0.5)
    rig = make_rig(memory_store)
    rig.save(range(8))
    held = HeldReads(memory_store, monkeypatch)
    rig.start(loads=tuple(LoadJob(job, keys(4), range(10 * job, 10 * job + 4)) for job in (1, 2)))
    held.await_calls(2)
    rig.start(cancelled_loads=(1,), loads=(LoadJob(3, keys(4), range(30, 34)),))
    assert rig.results(1) == [LoadResult(3, 0, "unavailable")], (
        "each thread is in a read that hangs"
    )
    assert not rig.worker.poll()

    held.may_continue.set()
    assert {result.job_id for result in rig.results(2)} == {1, 2}
    assert torch.equal(rig.pool[20:24], rig.pool[:4])


def poll_when_woken(rig: ConnectorRig, wakes: threading.Semaphore, num_results: int) -> list:
    """Polls only when it is woken, as an idle engine does."""
    found: list[LoadResult] = []
    while len(found) < num_results:
        assert wakes.acquire(timeout=TIMEOUT_S), "the engine was not woken"
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


def test_a_read_that_ends_after_the_others_were_dropped_wakes_the_engine(
    make_rig: Callable[[KvStore], ConnectorRig],
    memory_store: KvStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(io_threads, "_PATIENCE", 0)
    monkeypatch.setattr(io_threads, "_MIN_PATIENCE_S", 0.5)
    rig, wakes = make_rig(memory_store), threading.Semaphore(0)
    rig.save(range(NUM_BLOCKS))
    held = HeldReads(memory_store, monkeypatch)
    rig.worker.set_waker(wakes.release)
    rig.start(loads=(LoadJob(1, keys(NUM_BLOCKS), tuple(range(NUM_BLOCKS))),))
    assert wakes.acquire(timeout=TIMEOUT_S), "the threads hang"
    assert not rig.worker.poll(), "two pieces are dropped and two are being read"
    held.may_continue.set()
    (result,) = poll_when_woken(rig, wakes, 1)
    assert result == LoadResult(1, 2 * PIECE, "unavailable")


def test_only_the_valid_tokens_of_a_partial_tail_are_saved(rig: ConnectorRig) -> None:
    before = rig.pool.clone()
    rig.save([1, 2], num_tail_tokens=3)
    assert torch.equal(rig.pool, before)

    assert rig.load([11, 12]) == LoadResult(1, 2)
    assert torch.equal(rig.pool[11], before[1])
    assert torch.equal(rig.pool[12, ..., :3, :], before[2, ..., :3, :])
    assert not rig.pool[12, ..., 3:, :].any(), "only the valid tokens of a tail are saved"


@pytest.mark.usefixtures("no_segments")
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "delay"])
def test_faults_never_change_blocks_that_are_saved(
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
        # Later blocks may be loaded, zeroed or unchanged, and hold nothing else.
        for block, saved, old in zip(
            rig.pool[good:40], before[good - 20 :], before[good:40], strict=False
        ):
            assert not block.any() or torch.equal(block, saved) or torch.equal(block, old)
    assert torch.equal(rig.pool[:20], before[:20])


@pytest.mark.usefixtures("no_segments")
def test_a_save_with_a_failed_piece_is_not_committed(
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
    """A backend with one failing put per release of `fail`; counts puts that have begun."""

    def __init__(self) -> None:
        self.begun, self.fail = threading.Semaphore(0), threading.Semaphore(0)

    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[KvObject]) -> None:
        self.begun.release()
        assert self.fail.acquire(timeout=TIMEOUT_S)
        raise StoreUnavailableError("full")


@pytest.mark.usefixtures("no_segments")
def test_a_failed_save_starts_no_further_puts(
    make_rig: Callable[[KvStore], ConnectorRig], memory_store: KvStore
) -> None:
    rig, puts = make_rig(memory_store), FailingPuts()
    rig.worker.wrap_backend(lambda inner: puts)
    rig.start(saves=(SaveJob(5, keys(NUM_BLOCKS), tuple(range(NUM_BLOCKS))),))  # in four pieces
    puts.fail.release()
    for _ in range(3):
        assert puts.begun.acquire(timeout=TIMEOUT_S)
    assert not rig.worker.poll(), "two puts are in progress"
    puts.fail.release(2)

    assert rig.results(1) == [SaveResult(5, committed=False, error="unavailable")]
    assert not puts.begun.acquire(blocking=False)
