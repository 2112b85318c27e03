"""The store connector's worker while copies between pool and segments take their time."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from kvstore.registry import open_store
from tests.support.connector_rig import TIMEOUT_S, ConnectorRig, keys
from tests.support.held_copier import HeldCopier, HeldCopy

NUM_SEGMENTS = 8
LOST = RuntimeError("the device is lost")


class HeldRig(ConnectorRig):
    """A rig whose copies are held, with saved blocks under the keys 100 to 103."""

    def __init__(self, url: str) -> None:
        self.copier: HeldCopier
        super().__init__(open_store(url), self._hold)
        self.start(saves=(SaveJob(0, keys(4, 100), (1, 2, 3, 4)),))
        self.next_copy().end()
        assert self.results(1) == [SaveResult(0, committed=True)]

    def _hold(self, *pool_and_layout) -> HeldCopier:
        self.copier = HeldCopier(*pool_and_layout)
        return self.copier

    def next_copy(self) -> HeldCopy:
        """The oldest copy that was not asked for yet."""
        return self.copier.copies.pop(0)

    def start_load(self, *block_ids: int, job_id: int = 1) -> None:
        """Starts a load, and returns when its bytes have been read and not polled."""
        self.woken.clear()
        self.start(loads=(LoadJob(job_id, keys(len(block_ids), 100), block_ids),))
        assert self.woken.wait(TIMEOUT_S)

    def start_landing(self, *block_ids: int) -> HeldCopy:
        """Starts a load, and returns when somebody waits for its copy into the pool."""
        self.start_load(*block_ids)
        assert not self.worker.poll()
        landing = self.next_copy()
        assert landing.is_awaited.wait(TIMEOUT_S)
        return landing

    def check_segments_are_free(self) -> None:
        """Every segment can be taken at once."""
        jobs = tuple(SaveJob(1000 + i, keys(1, 1000 + i), (i,)) for i in range(2 * NUM_SEGMENTS))
        self.start(saves=jobs)
        assert len(self.copier.copies) == NUM_SEGMENTS
        for _ in jobs:
            self.next_copy().end()
            (result,) = self.results(1)
            assert result.committed


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[HeldRig]:
    rig = HeldRig(f"memory://{tmp_path.name}")
    yield rig
    for copy in rig.copier.copies:
        copy.end(LOST)
    rig.worker.close()


def test_nothing_is_put_before_it_is_gathered(rig: HeldRig) -> None:
    rig.start(saves=(SaveJob(1, keys(2), (8, 9), 3),))
    copy = rig.next_copy()
    assert copy.is_awaited.wait(TIMEOUT_S)
    assert not rig.worker.poll()
    assert rig.store.contains_prefix(keys(1)) == 0
    copy.end()
    assert rig.results(1) == [SaveResult(1, committed=True)]

    rig.start(loads=(LoadJob(2, keys(2), (20, 21)),))
    assert rig.woken.wait(TIMEOUT_S)
    rig.worker.poll()
    rig.next_copy().end()
    assert rig.results(1) == [LoadResult(2, 2)]
    assert torch.equal(rig.pool[20], rig.pool[8])
    assert torch.equal(rig.pool[21, ..., :3, :], rig.pool[9, ..., :3, :])
    assert not rig.pool[21, ..., 3:, :].any(), "what lies behind a tail does not leave the process"


def test_a_load_is_told_when_it_has_landed(rig: HeldRig) -> None:
    before = rig.pool.clone()
    rig.woken.clear()
    landing = rig.start_landing(20, 21, 22, 23)
    rig.woken.clear()

    assert not rig.worker.poll()
    assert torch.equal(rig.pool, before)
    landing.end()
    assert rig.woken.wait(TIMEOUT_S), "nobody else would look"
    assert rig.worker.poll().loads == (LoadResult(1, 4),)
    assert torch.equal(rig.pool[20:24], before[1:5])


def test_a_load_that_is_cancelled_before_its_copy_never_lands(rig: HeldRig) -> None:
    rig.start_load(20, 21)
    rig.start(cancelled_loads=(1,))

    assert rig.worker.poll().loads == (LoadResult(1, 0, "cancelled"),)
    assert not rig.copier.copies
    rig.check_segments_are_free()


def test_a_load_that_is_cancelled_in_its_copy_ends_after_it(rig: HeldRig) -> None:
    landing = rig.start_landing(20, 21)
    rig.start(cancelled_loads=(1,))
    assert not rig.worker.poll(), "bytes may still come"
    landing.end()

    assert rig.results(1) == [LoadResult(1, 2)], "all came"
    rig.check_segments_are_free()


def test_a_missing_block_is_told_after_those_before_it_have_landed(rig: HeldRig) -> None:
    rig.store.delete(keys(1, 102))
    landing = rig.start_landing(20, 21, 22, 23)
    assert not rig.worker.poll()
    landing.end()

    assert rig.results(1) == [LoadResult(1, 2, "missing")]
    assert torch.equal(rig.pool[20:22], rig.pool[1:3])


def test_loads_land_beside_saves_that_wait(rig: HeldRig) -> None:
    rig.start(saves=tuple(SaveJob(2 + i, keys(1, i), (i,)) for i in range(2)))
    waiting = [rig.next_copy(), rig.next_copy()]
    rig.start(loads=(LoadJob(1, keys(4, 100), (20, 21, 22, 23)),))
    waiting[0].end()
    assert rig.results(1) == [SaveResult(2, committed=True)]
    while not rig.copier.copies:
        assert rig.woken.wait(TIMEOUT_S)
        rig.woken.clear()
        assert not rig.worker.poll()
    rig.next_copy().end()

    assert rig.results(1) == [LoadResult(1, 4)]
    waiting[1].end()
    assert rig.results(1) == [SaveResult(3, committed=True)]


def test_a_copy_that_fails_ends_its_save(rig: HeldRig) -> None:
    rig.start(saves=(SaveJob(1, keys(2), (8, 9)),))
    rig.next_copy().end(LOST)

    assert rig.results(1) == [SaveResult(1, committed=False, error="failed")]
    assert rig.store.contains_prefix(keys(1)) == 0
    rig.check_segments_are_free()


def test_a_copy_that_fails_ends_its_load(rig: HeldRig) -> None:
    rig.start_landing(20, 21).end(LOST)

    assert rig.results(1) == [LoadResult(1, 0, "failed")]
    rig.check_segments_are_free()


def test_a_copy_that_cannot_start_ends_its_job(rig: HeldRig) -> None:
    rig.copier.refusal = LOST
    rig.woken.clear()
    rig.start(saves=(SaveJob(1, keys(2), (8, 9)),))
    assert rig.woken.is_set(), "nobody else would look"
    assert rig.results(1) == [SaveResult(1, committed=False, error="failed")]
    rig.start_load(20, 21, job_id=2)
    assert rig.worker.poll().loads == (LoadResult(2, 0, "failed"),)

    rig.copier.refusal = None
    rig.check_segments_are_free()


def test_closing_waits_for_copies_under_way(rig: HeldRig) -> None:
    landing = rig.start_landing(20, 21)
    rig.start(saves=tuple(SaveJob(2 + i, keys(1, i), (i,)) for i in range(NUM_SEGMENTS - 1)))
    copies = rig.copier.copies = [landing, *rig.copier.copies]
    closing = threading.Thread(target=rig.worker.close)
    closing.start()
    for copy in copies:
        assert not rig.copier.is_closed
        copy.end()
    closing.join(TIMEOUT_S)

    assert not closing.is_alive()
    assert rig.copier.is_closed
