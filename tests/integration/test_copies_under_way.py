"""The store connector's worker while copies between pool and segments are in progress."""

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
        """Removes and returns the oldest copy."""
        return self.copier.copies.pop(0)

    def start_load(self, *block_ids: int, job_id: int = 1) -> None:
        """Starts a load; returns once its bytes have been read, before a poll."""
        self.woken.clear()
        self.start(loads=(LoadJob(job_id, keys(len(block_ids), 100), block_ids),))
        assert self.woken.wait(TIMEOUT_S)

    def start_scatter(self, *block_ids: int) -> HeldCopy:
        """Starts a load; returns once a thread waits for its copy into the pool."""
        self.start_load(*block_ids)
        assert not self.worker.poll()
        scatter = self.next_copy()
        assert scatter.is_awaited.wait(TIMEOUT_S)
        return scatter

    def check_segments_are_free(self) -> None:
        """Checks that all segments can be in use at once."""
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


def test_a_block_is_put_only_after_its_copy_out_of_the_pool(rig: HeldRig) -> None:
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
    assert not rig.pool[21, ..., 3:, :].any(), "only the valid tokens of a tail are saved"


def test_a_load_ends_once_it_is_copied_into_the_pool(rig: HeldRig) -> None:
    before = rig.pool.clone()
    rig.woken.clear()
    scatter = rig.start_scatter(20, 21, 22, 23)
    rig.woken.clear()

    assert not rig.worker.poll()
    assert torch.equal(rig.pool, before)
    scatter.end()
    assert rig.woken.wait(TIMEOUT_S), "without a wake-up the engine would not poll"
    assert rig.worker.poll().loads == (LoadResult(1, 4),)
    assert torch.equal(rig.pool[20:24], before[1:5])


def test_a_load_cancelled_before_its_copy_never_writes_the_pool(rig: HeldRig) -> None:
    rig.start_load(20, 21)
    rig.start(cancelled_loads=(1,))

    assert rig.worker.poll().loads == (LoadResult(1, 0, "cancelled"),)
    assert not rig.copier.copies
    rig.check_segments_are_free()


def test_a_load_cancelled_during_its_copy_ends_after_the_copy(rig: HeldRig) -> None:
    scatter = rig.start_scatter(20, 21)
    rig.start(cancelled_loads=(1,))
    assert not rig.worker.poll(), "the copy may still write bytes"
    scatter.end()

    assert rig.results(1) == [LoadResult(1, 2)], "the copy was completed"
    rig.check_segments_are_free()


def test_a_missing_block_ends_a_load_after_the_blocks_before_it_are_copied(rig: HeldRig) -> None:
    rig.store.delete(keys(1, 102))
    scatter = rig.start_scatter(20, 21, 22, 23)
    assert not rig.worker.poll()
    scatter.end()

    assert rig.results(1) == [LoadResult(1, 2, "missing")]
    assert torch.equal(rig.pool[20:22], rig.pool[1:3])


def test_a_load_ends_while_a_save_waits_for_its_copy(rig: HeldRig) -> None:
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
    rig.start_scatter(20, 21).end(LOST)

    assert rig.results(1) == [LoadResult(1, 0, "failed")]
    rig.check_segments_are_free()


def test_a_copy_that_cannot_start_ends_its_job(rig: HeldRig) -> None:
    rig.copier.refusal = LOST
    rig.woken.clear()
    rig.start(saves=(SaveJob(1, keys(2), (8, 9)),))
    assert rig.woken.is_set(), "without a wake-up the engine would not poll"
    assert rig.results(1) == [SaveResult(1, committed=False, error="failed")]
    rig.start_load(20, 21, job_id=2)
    assert rig.worker.poll().loads == (LoadResult(2, 0, "failed"),)

    rig.copier.refusal = None
    rig.check_segments_are_free()


def test_close_waits_for_copies_in_progress(rig: HeldRig) -> None:
    scatter = rig.start_scatter(20, 21)
    rig.start(saves=tuple(SaveJob(2 + i, keys(1, i), (i,)) for i in range(NUM_SEGMENTS - 1)))
    copies = rig.copier.copies = [scatter, *rig.copier.copies]
    closing = threading.Thread(target=rig.worker.close)
    closing.start()
    for copy in copies:
        assert not rig.copier.is_closed
        copy.end()
    closing.join(TIMEOUT_S)

    assert not closing.is_alive()
    assert rig.copier.is_closed
