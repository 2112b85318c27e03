"""Loads in doubt: a peer may still write to their memory, so it stays held until that ends."""

import threading
import time

import pytest
import torch

from kvstore.codec import make_headers
from kvstore.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from kvstore.layout import KvLayout
from kvstore.mover.backend import InDoubtError
from kvstore.mover.mover import BlockMover, copier_for
from kvstore.store import GetStatus
from tests.support.connector_rig import keys
from tests.support.held_copier import StagedCopier

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, block_size=4, head_dim=5, dtype="float32")
TIMEOUT_S = 10.0
NUM_SEGMENTS = 2


class FakePeer:
    """A backend of blocks of ones, twos and so on; fetches are in doubt while `is_silent`."""

    def __init__(self):
        self.is_silent = self.has_settled = False
        self.num_fetches = 0

    def num_held(self, keys):
        return 0

    def put(self, job, keys, slots):
        pass

    def fetch(self, job, keys, slots):
        self.num_fetches += 1
        if self.is_silent:
            raise InDoubtError("silent", lambda: self.has_settled)
        for key, slot in zip(keys, slots, strict=True):
            slot.fill(sealed_block(key))
        return [GetStatus.HIT] * len(keys)

    def discard(self, key):
        pass


def block_of_key(key):
    return torch.full(LAYOUT.block_shape, key[-1] + 1.0)


def sealed_block(key):
    payload = block_of_key(key).numpy().tobytes()
    [header] = make_headers([memoryview(payload)], [key])
    return header + payload


class Rig:
    """A mover that is polled only when the test says so."""

    def __init__(self, copier_of=StagedCopier, num_threads=2):
        self.peer = FakePeer()
        self.woken = threading.Event()
        self.mover = BlockMover(self.peer, self.woken.set, copier_of, num_threads)
        self.pool = torch.zeros(16, *LAYOUT.block_shape)
        self.mover.register_pool(self.pool, LAYOUT)
        self.results = []

    def wait(self):
        """Waits until an I/O thread has done its part of a piece."""
        assert self.woken.wait(TIMEOUT_S)
        self.woken.clear()

    def run_until(self, num_results):
        until = time.monotonic() + TIMEOUT_S
        while len(self.results) < num_results:
            assert time.monotonic() < until
            for results in self.mover.poll():
                self.results += results
            self.woken.wait(0.01)
        return self.results

    def lose_segments(self):
        """Starts loads until every segment is in doubt; returns the jobs."""
        self.peer.is_silent = True
        jobs = range(100, 100 + NUM_SEGMENTS)
        self.mover.start(loads=[LoadJob(job_id, keys(1), (0,)) for job_id in jobs])
        until = time.monotonic() + TIMEOUT_S
        while self.mover.num_in_doubt < NUM_SEGMENTS:
            assert time.monotonic() < until
            self.woken.wait(0.01)
            assert self.mover.poll() == ([], []), "a result would free the blocks"
        self.peer.is_silent = False
        return list(jobs)


@pytest.fixture
def make_rig(monkeypatch):
    monkeypatch.setattr("kvstore.mover.staging._NUM_SEGMENTS", NUM_SEGMENTS)
    rigs = []

    def make(*arguments, **options):
        rigs.append(Rig(*arguments, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.mover.close()


def test_jobs_fail_at_once_while_every_segment_is_in_doubt(make_rig):
    rig = make_rig()
    lost = rig.lose_segments()
    assert rig.mover.take_doubted() == lost
    rig.mover.start(loads=[LoadJob(7, keys(1), (4,))], saves=[SaveJob(8, keys(1, 8), (8,))])
    results = rig.run_until(2)
    assert sorted(results, key=lambda result: result.job_id) == [
        LoadResult(7, 0, "unavailable"),
        SaveResult(8, committed=False, error="unavailable"),
    ]
    assert rig.mover.is_in_doubt


def test_a_segment_is_reused_once_its_doubt_settles(make_rig):
    rig = make_rig()
    lost = rig.lose_segments()
    for segment in rig.mover.staging.segments:
        segment.frames[:] = 0x5A  # a late write, before the doubt settles
    rig.peer.has_settled = True
    assert {(each.job_id, each.error) for each in rig.run_until(NUM_SEGMENTS)} == {
        (job_id, "unavailable") for job_id in lost
    }
    assert not rig.mover.is_in_doubt
    assert not rig.pool.any()
    rig.results.clear()
    rig.mover.start(loads=[LoadJob(1, keys(3), (4, 5, 6))])
    assert rig.run_until(1) == [LoadResult(1, 3)]
    for block_id, key in zip((4, 5, 6), keys(3), strict=True):
        assert torch.equal(rig.pool[block_id], block_of_key(key))


def test_one_segment_in_doubt_does_not_delay_other_loads(make_rig):
    rig = make_rig()
    rig.peer.is_silent = True
    rig.mover.start(loads=[LoadJob(1, keys(1), (0,))])
    while not rig.mover.is_in_doubt:
        rig.wait()
        rig.mover.poll()
    rig.peer.is_silent = False
    rig.mover.start(loads=[LoadJob(2, keys(1), (4,))])
    assert rig.run_until(1) == [LoadResult(2, 1)]
    assert rig.mover.is_in_doubt


@pytest.fixture
def in_place(make_rig, monkeypatch):
    """A rig whose single thread fetches two blocks at a time directly into the pool."""
    monkeypatch.setattr("kvstore.mover.mover._MIN_PIECE_BYTES", 2 * LAYOUT.block_bytes)
    rig = make_rig(copier_for, num_threads=1)
    rig.peer.is_silent = True
    return rig


def test_pool_blocks_stay_held_while_a_read_may_write_to_them(in_place):
    is_known, fetch = threading.Event(), in_place.peer.fetch

    def fetch_when_known(job, keys, slots):
        assert not in_place.peer.num_fetches or is_known.wait(TIMEOUT_S)
        return fetch(job, keys, slots)

    in_place.peer.fetch = fetch_when_known
    in_place.mover.start(loads=[LoadJob(1, keys(6), (3, 4, 5, 6, 7, 8))])
    while not in_place.mover.is_in_doubt:
        in_place.wait()
        assert in_place.mover.poll() == ([], []), "a result would free the blocks"
    assert in_place.mover.take_doubted() == [1], "the engine gives the load up"
    is_known.set()
    [job] = in_place.mover._jobs.values()
    while job.num_open > len(in_place.mover._doubtful._ends):
        in_place.woken.wait(0.01)
        assert in_place.mover.poll() == ([], [])
    assert in_place.mover.num_in_doubt == 2 * in_place.peer.num_fetches
    in_place.pool[3:5] = torch.nan
    in_place.peer.has_settled = True

    assert in_place.run_until(1) == [LoadResult(1, 0, "unavailable")]
    assert not in_place.pool.any(), "no NaN is left in the pool"
    assert not in_place.mover.is_in_doubt
    assert in_place.peer.num_fetches < 3, "a failed load fetches no further pieces"
    assert in_place.mover.take_doubted() == [], "a load in doubt is returned once"


def test_a_load_in_place_in_doubt_does_not_delay_other_loads(in_place):
    in_place.mover.start(loads=[LoadJob(1, keys(1), (3,))])
    while not in_place.mover.is_in_doubt:
        in_place.wait()
        in_place.mover.poll()
    in_place.peer.is_silent = False
    in_place.mover.start(loads=[LoadJob(2, keys(1), (4,))])

    assert in_place.run_until(1) == [LoadResult(2, 1)]
    assert torch.equal(in_place.pool[4], block_of_key(keys(1)[0]))
    assert in_place.mover.is_in_doubt


def test_a_load_whose_doubt_settles_before_the_next_poll_ends_in_that_poll(in_place):
    """Nothing wakes the engine again, so this poll must end the load."""
    in_place.peer.has_settled = True
    in_place.mover.start(loads=[LoadJob(1, keys(1), (3,))])
    in_place.wait()
    assert in_place.mover.poll() == ([LoadResult(1, 0, "unavailable")], [])
    assert in_place.mover.take_doubted() == []


def test_a_cancelled_load_in_doubt_ends_as_unavailable(in_place):
    in_place.mover.start(loads=[LoadJob(1, keys(1), (3,))])
    while not in_place.mover.is_in_doubt:
        in_place.wait()
        in_place.mover.poll()
    in_place.mover.start(cancelled_loads=[1])
    in_place.peer.has_settled = True
    assert in_place.run_until(1) == [LoadResult(1, 0, "unavailable")]
