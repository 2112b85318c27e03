"""`JobTable`: deadlines of jobs; each job is due once."""

import math
from types import SimpleNamespace

import pytest

from engine.kv_transfer.jobs import JobTable, Load, Lookup, Save

GROUP = SimpleNamespace()


def load(job_id: int, *block_ids: int) -> Load:
    return Load(job_id=job_id, block_ids=list(block_ids), group=GROUP, indices=[0], num_tokens=1)


def save(job_id: int, *, step: int = 0) -> Save:
    return Save(job_id=job_id, block_ids=[job_id], group=GROUP, lease_id="", step=step)


@pytest.fixture
def table() -> JobTable:
    return JobTable(timeout_s=5.0)


def test_a_job_is_due_once_and_stays_in_the_table(table: JobTable) -> None:
    job = load(1, 7, 8)
    table.add(job)
    assert table.next_deadline is None, "the worker half has not received the job"
    table.start_added(10.0)
    assert (job.started_at, table.next_deadline) == (10.0, 15.0)
    assert table.take_due(14.9) == ([], [])
    assert table.take_due(15.0) == ([job], [])
    assert table.take_due(99.0) == ([], [])
    assert table.next_deadline is None
    assert table.held_blocks() == [7, 8]


def test_a_closed_job_is_never_due(table: JobTable) -> None:
    table.add(Lookup(job_id=1, group=GROUP, num_keys=3))
    table.start_added(0.0)
    del table.open[1]
    assert table.take_due(99.0) == ([], [])
    assert table.next_deadline is None


def test_a_slow_load_is_due_at_its_wait_limit_and_again_at_its_timeout(table: JobTable) -> None:
    job = load(1)
    table.add(job)
    table.start_added(0.0)
    table.limit_wait(job, 2.0)
    assert table.next_deadline == 2.0
    assert table.take_due(2.0) == ([], [job])
    assert table.next_deadline == 5.0
    assert table.take_due(5.0) == ([job], [])


def test_a_load_past_its_timeout_is_not_reported_as_slow_too(table: JobTable) -> None:
    job = load(1)
    table.add(job)
    table.start_added(0.0)
    table.limit_wait(job, 2.0)
    assert table.take_due(6.0) == ([job], [])
    assert table.take_due(99.0) == ([], [])


def test_a_load_with_an_infinite_wait_limit_is_never_slow(table: JobTable) -> None:
    job = load(1)
    table.add(job)
    table.limit_wait(job, math.inf)
    assert table.take_due(1e9) == ([], [])


@pytest.mark.parametrize("starts_first", [True, False])
def test_the_timeout_of_a_save_ahead_starts_when_its_step_is_over(
    table: JobTable, starts_first: bool
) -> None:
    early, late = save(1, step=3), save(2, step=4)
    table.add(early)
    table.add(late)
    if starts_first:
        table.start_added(1.0)
    table.step_ended(3, 2.0)
    table.start_added(2.0)
    assert table.take_due(7.0) == ([early], [])
    assert table.next_deadline is None
    table.step_ended(4, 10.0)
    assert table.take_due(15.0) == ([late], [])


def test_lent_saves_hold_their_blocks_and_have_no_deadline(table: JobTable) -> None:
    job = save(4)
    table.add(job)
    table.start_added(0.0)
    table.lent[4] = table.open.pop(4)
    assert list(table.saves()) == [job]
    assert table.held_blocks() == [4]
    assert table.next_deadline is None
