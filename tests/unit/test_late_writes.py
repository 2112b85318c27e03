"""A peer that writes to a segment when it should not: nothing of it reaches the pool.

Nor is anything of the pool given to others while somebody may write there.
"""

import threading
import time

import pytest
import torch

from kvstore.codec import make_headers
from kvstore.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from kvstore.layout import KvLayout
from kvstore.mover.backend import InDoubtError
from kvstore.mover.copies import HostCopier
from kvstore.mover.mover import BlockMover
from kvstore.quarantine import QUARANTINE_S
from kvstore.store import GetStatus
from tests.support.connector_rig import keys

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, block_size=4, head_dim=5, dtype="float32")
TIMEOUT_S = 10.0
NUM_SEGMENTS = 2


class Peer:
    """Lends blocks of ones, twos and so on; its transfers fail while it `is_silent`."""

    takes_frames = False

    def __init__(self):
        self.is_silent = self.has_settled = False
        self.num_fetches = 0
        self.put_slots = {}

    def num_held(self, keys):
        return 0

    def put(self, job, keys, slots):
        for key, slot in zip(keys, slots, strict=True):
            self.put_slots[key] = slot.to_bytes()

    def fetch(self, job, keys, slots):
        self.num_fetches += 1
        if self.is_silent:
            raise InDoubtError("silent", lambda: self.has_settled)
        for key, slot in zip(keys, slots, strict=True):
            slot.fill(sealed(key))
        return [GetStatus.HIT] * len(keys)

    def discard(self, key):
        pass


def block(key):
    return torch.full(LAYOUT.block_shape, key[-1] + 1.0)


def sealed(key):
    payload = block(key).numpy().tobytes()
    [header] = make_headers([memoryview(payload)], [key])
    return header + payload


class Rig:
    """A mover whose engine polls only when the test says so."""

    def __init__(self, make_copier=None, num_threads=2):
        self.peer = Peer()
        self.woken = threading.Event()
        self.mover = BlockMover(self.peer, self.woken.set, make_copier, num_threads)
        self.pool = torch.zeros(16, *LAYOUT.block_shape)
        self.mover.register_pool(self.pool, LAYOUT)
        self.results = []

    def wait(self):
        """Returns when an I/O thread has done its part."""
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

    def lose_trust(self):
        """Has every segment end up in quarantine, and outlast it."""
        self.lose_segments()
        self.mover.staging._quarantine._clock = lambda: time.monotonic() + QUARANTINE_S

    def lose_segments(self):
        """Has every segment end up in quarantine."""
        self.peer.is_silent = True
        for job_id in range(100, 100 + NUM_SEGMENTS):
            self.mover.start(loads=[LoadJob(job_id, keys(1), (0,))])
            self.run_until(job_id - 99)
        assert {result.error for result in self.results} == {"unavailable"}
        self.results.clear()
        self.woken.clear()
        self.peer.is_silent = False

    def write_late(self):
        """To all memory that peers know."""
        for segment in self.mover.staging.segments:
            segment.frames[:] = 0x5A


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


@pytest.fixture
def doubtful(make_rig):
    """A rig with nothing but doubtful segments."""
    rig = make_rig()
    rig.lose_trust()
    return rig


def test_a_late_write_between_verification_and_copy_does_not_reach_the_pool(doubtful):
    doubtful.mover.start(loads=[LoadJob(1, keys(3), (4, 5, 6))])
    doubtful.wait()  # verified, and not copied yet
    doubtful.write_late()
    assert doubtful.run_until(1) == [LoadResult(1, 3)]
    for block_id, key in zip((4, 5, 6), keys(3), strict=True):
        assert torch.equal(doubtful.pool[block_id], block(key))
    assert all(segment.is_doubtful for segment in doubtful.mover.staging.segments)


def test_a_late_write_before_verification_fails_the_load_alone(doubtful):
    fetch = doubtful.peer.fetch

    def fetch_and_write_late(job, keys, slots):
        statuses = fetch(job, keys, slots)
        slots[1].payload[-1] ^= 1
        return statuses

    doubtful.peer.fetch = fetch_and_write_late
    doubtful.mover.start(loads=[LoadJob(1, keys(3), (4, 5, 6))])
    assert doubtful.run_until(1) == [LoadResult(1, 1, "corrupt")]
    assert torch.equal(doubtful.pool[4], block(keys(1)[0]))
    assert not doubtful.pool[5:].any()


def test_a_late_write_does_not_change_what_is_saved(make_rig):
    """Else it would be sealed as if it were right."""
    gathered = threading.Event()

    class LateCopier(HostCopier):
        def gather(self, object_ids, segment):
            super().gather(object_ids, segment)
            rig.write_late()
            gathered.set()

    rig = make_rig(lambda pool, cut: LateCopier(pool))
    rig.lose_trust()
    rig.pool[3] = 9.0
    rig.mover.start(saves=[SaveJob(1, keys(1), (3,))])
    assert rig.run_until(1) == [SaveResult(1, committed=True)]
    assert gathered.is_set()
    slot = rig.peer.put_slots[keys(1)[0]]
    assert [slot[:64]] == make_headers([memoryview(slot[64:])], keys(1))
    assert slot[64:] == rig.pool[3].numpy().tobytes()


def test_with_all_segments_in_quarantine_loads_fail_at_once_and_saves_go_on(make_rig):
    rig = make_rig()
    rig.lose_segments()
    assert rig.mover.staging.is_lost
    saves = [SaveJob(job_id, keys(1, job_id), (job_id,)) for job_id in range(3)]
    rig.mover.start(loads=[LoadJob(7, keys(1), (4,))], saves=saves)
    results = rig.run_until(4)
    assert sorted(results, key=lambda result: result.job_id) == [
        *[SaveResult(job_id, committed=True) for job_id in range(3)],
        LoadResult(7, 0, "unavailable"),
    ]
    assert rig.mover.staging.is_lost
    assert rig.mover.is_in_doubt


@pytest.fixture
def in_place(make_rig, monkeypatch):
    """A rig that fetches two blocks at a time to where they shall be, by one thread."""
    monkeypatch.setattr("kvstore.mover.mover._LEAST_PIECE_BYTES", 2 * LAYOUT.block_bytes)
    rig = make_rig(num_threads=1)
    rig.peer.takes_frames = rig.peer.is_silent = True
    return rig


def test_a_pools_blocks_are_nobodys_while_a_peer_may_write_there(in_place):
    is_known, fetch = threading.Event(), in_place.peer.fetch

    def fetch_when_known(job, keys, slots):
        assert not in_place.peer.num_fetches or is_known.wait(TIMEOUT_S)
        return fetch(job, keys, slots)

    in_place.peer.fetch = fetch_when_known
    in_place.mover.start(loads=[LoadJob(1, keys(6), (3, 4, 5, 6, 7, 8))])
    while not in_place.mover.is_in_doubt:
        in_place.wait()
        assert in_place.mover.poll() == ([], []), "with a result the blocks would be free"
    assert in_place.mover.take_doubted() == [1], "who waits had better not"
    is_known.set()
    [job] = in_place.mover._jobs.values()
    while job.num_open > len(in_place.mover._in_doubt):
        in_place.woken.wait(0.01)
        assert in_place.mover.poll() == ([], [])
    assert in_place.mover.num_in_doubt == 2 * in_place.peer.num_fetches
    in_place.pool[3:5] = torch.nan
    in_place.peer.has_settled = True

    assert in_place.run_until(1) == [LoadResult(1, 0, "unavailable")]
    assert not in_place.pool.any(), "nor is anything left there that is no number"
    assert not in_place.mover.is_in_doubt
    assert in_place.peer.num_fetches < 3, "nothing more is fetched for a load that has failed"
    assert in_place.mover.take_doubted() == [], "it is told once"


def test_a_doubt_about_one_load_in_place_holds_up_no_other(in_place):
    in_place.mover.start(loads=[LoadJob(1, keys(1), (3,))])
    while not in_place.mover.is_in_doubt:
        in_place.wait()
        in_place.mover.poll()
    in_place.peer.is_silent = False
    in_place.mover.start(loads=[LoadJob(2, keys(1), (4,))])

    assert in_place.run_until(1) == [LoadResult(2, 1)]
    assert torch.equal(in_place.pool[4], block(keys(1)[0]))
    assert in_place.mover.is_in_doubt


def test_a_doubt_that_has_settled_before_the_engine_hears_of_it_ends_then(in_place):
    """Nobody wakes the engine once more."""
    in_place.peer.has_settled = True
    in_place.mover.start(loads=[LoadJob(1, keys(1), (3,))])
    in_place.wait()
    assert in_place.mover.poll() == ([LoadResult(1, 0, "unavailable")], [])
    assert in_place.mover.take_doubted() == []


def test_a_load_in_doubt_that_is_cancelled_was_unavailable(in_place):
    in_place.mover.start(loads=[LoadJob(1, keys(1), (3,))])
    while not in_place.mover.is_in_doubt:
        in_place.wait()
        in_place.mover.poll()
    in_place.mover.start(cancelled_loads=[1])
    in_place.peer.has_settled = True
    assert in_place.run_until(1) == [LoadResult(1, 0, "unavailable")]
