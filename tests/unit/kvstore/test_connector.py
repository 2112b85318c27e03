"""The base scheduler half collects jobs; the null connector ends them without moving blocks."""

from kvstore.connector import KvConnectorScheduler, null_connector
from kvstore.jobs import (
    ConnectorWork,
    LoadResult,
    LookupResult,
    SaveJob,
    SaveResult,
    TransferResults,
)

KEYS = (b"a" * 32, b"b" * 32)


def test_build_work_returns_the_jobs_since_the_previous_call():
    scheduler = KvConnectorScheduler("fake", lease_s=1)
    job = scheduler.save(KEYS, (3, 4), 2, num_found=1, lease_id="lease")
    work = scheduler.build_work()
    scheduler.delete(KEYS)
    scheduler.keep(scheduler.make_handoff("h", b"n", KEYS, 7))

    assert work == ConnectorWork(saves=[SaveJob(job, KEYS, (3, 4), 2, 1, "lease")])
    later = scheduler.build_work()
    assert later.deletes == list(KEYS)
    assert [handoff.handoff_id for handoff in later.kept] == ["h"]
    assert not scheduler.build_work()


def test_the_result_of_a_forgotten_lookup_is_dropped():
    scheduler = KvConnectorScheduler("fake", lease_s=1)
    open_one, answered = scheduler.lookup(KEYS), scheduler.lookup(KEYS)
    scheduler.update(TransferResults(lookups=(LookupResult(answered, 2),)))
    assert scheduler.num_found(open_one) is None
    assert scheduler.num_found(answered) == 2

    scheduler.forget_lookup(open_one)
    scheduler.forget_lookup(answered)
    assert scheduler.build_work().cancelled_lookups == [open_one]
    scheduler.update(TransferResults(lookups=(LookupResult(open_one, 1),)))


def test_the_null_connector_ends_every_job_without_moving_blocks():
    scheduler, worker = null_connector()
    wakes: list[int] = []
    worker.set_waker(lambda: wakes.append(1))
    lookup, load, save = (
        scheduler.lookup(KEYS),
        scheduler.load(KEYS, (0, 1)),
        scheduler.save(KEYS, (2, 3)),
    )
    worker.start(scheduler.build_work())

    assert wakes
    assert scheduler.update(worker.poll()) == TransferResults(
        (LookupResult(lookup, 0),),
        (LoadResult(load, 0, "missing"),),
        (SaveResult(save, committed=False),),
    )
    assert scheduler.num_found(lookup) == 0
    assert not worker.poll()
    assert not scheduler.finds_by_key
    worker.close()
    worker.close()
