"""`PieceIo` counts its calls of a backend if it has metrics."""

import pytest

from kvstore.codec import HEADER_BYTES, seal
from kvstore.guard.metrics import TransferMetrics
from kvstore.jobs import LoadJob, SaveJob
from kvstore.mover.piece_io import PieceIo
from kvstore.mover.pieces import JobState
from kvstore.store import GetStatus, StoreUnavailableError

KEYS = (b"a" * 32, b"b" * 32)
BLOCK_BYTES = 50
OBJECT_BYTES = HEADER_BYTES + BLOCK_BYTES


class FakeBackend:
    def __init__(self) -> None:
        self.fails = False
        self.is_corrupt = False
        self.discarded: list[bytes] = []

    def num_held(self, keys):
        return 1

    def put(self, job, keys, objects):
        if self.fails:
            raise StoreUnavailableError("down")

    def fetch(self, job, keys, objects):
        if self.fails:
            raise StoreUnavailableError("down")
        if not self.is_corrupt:
            seal(objects[:1], keys[:1])
        return [GetStatus.HIT, GetStatus.MISSING]

    def discard(self, key):
        self.discarded.append(key)


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def io(backend):
    io = PieceIo(backend, lambda: None, 1, 1.0)
    io.rows = lambda object_ids: [memoryview(bytearray(BLOCK_BYTES)) for _ in object_ids]
    io.metrics = TransferMetrics()
    return io


def piece_of(job):
    ((_, piece),) = JobState(job).start_in_place(len(KEYS))
    return piece


def save(io):
    job = SaveJob(2, KEYS, (0, 1))
    return io.put(job, piece_of(job))


def load(io):
    job = LoadJob(1, KEYS, (0, 1))
    return io.read_in_place(job, piece_of(job))


def test_calls_count_the_objects_and_bytes_they_move(io):
    assert save(io).num_good == 2
    assert load(io).num_good == 1
    assert io.num_held(KEYS) == 1
    values, histograms = io.metrics.snapshot()
    assert values["baton_kv_objects", "save"] == 2
    assert values["baton_kv_bytes", "save"] == 2 * OBJECT_BYTES
    assert values["baton_kv_objects", "load"] == 1
    assert values["baton_kv_bytes", "load"] == OBJECT_BYTES
    assert values["baton_kv_skipped_objects",] == 1
    for direction in ("save", "load"):
        assert sum(histograms["baton_kv_call_seconds", direction].counts) == 1


def test_calls_that_fail_are_timed_and_move_nothing(io, backend):
    backend.fails = True
    for move in (save, load):
        with pytest.raises(StoreUnavailableError):
            move(io)
    values, histograms = io.metrics.snapshot()
    assert values["baton_kv_bytes", "save"] == values["baton_kv_bytes", "load"] == 0
    assert sum(histograms["baton_kv_call_seconds", "save"].counts) == 1
    assert sum(histograms["baton_kv_call_seconds", "load"].counts) == 1


def test_corrupt_objects_are_discarded_and_counted(io, backend):
    backend.is_corrupt = True
    assert load(io).error == "corrupt"
    assert backend.discarded == [KEYS[0]]
    assert io.metrics.snapshot()[0]["baton_kv_verify_failures",] == 1


def test_calls_work_without_metrics(io, backend):
    io.metrics = None
    backend.is_corrupt = True
    assert (save(io).num_good, load(io).num_good, io.num_held(KEYS)) == (2, 0, 1)
