"""The wrappers count what passes through them, and pass everything on."""

import pytest

from kvstore.jobs import (
    ConnectorWork,
    LoadJob,
    LoadResult,
    LookupJob,
    LookupResult,
    SaveJob,
    SaveResult,
    TransferResults,
)
from kvstore.measured import MeasuredWorker
from kvstore.metrics import KvMetrics, TransferMetrics
from tests.support.fake_connector import FakeWorker

LOAD = LoadJob(1, (b"a", b"b"), (0, 1))
SAVE = SaveJob(2, (b"a",), (0,))


class ScriptedWorker(FakeWorker):
    """Reports what the test puts into `results`."""

    def __init__(self) -> None:
        super().__init__({})
        self.results = TransferResults()
        self.measured: list[tuple[KvMetrics, str]] = []
        self.registered: list[object] = []

    def register_pool(self, *args: object) -> None:
        self.registered += args

    def start(self, work: ConnectorWork) -> None:
        self.pending += (*work.lookups, *work.loads, *work.saves)

    def measure(self, metrics: KvMetrics, backend: str) -> None:
        self.measured.append((metrics, backend))

    def poll(self) -> TransferResults:
        results, self.results = self.results, TransferResults()
        return results


class Rig:
    def __init__(self) -> None:
        self.inner = ScriptedWorker()
        self.metrics = TransferMetrics()
        self.now = 10.0
        self.worker = MeasuredWorker(self.inner, self.metrics, lambda: self.now)

    def report(self, **results: object) -> None:
        self.inner.results = TransferResults(**results)
        assert self.worker.poll() == TransferResults(**results)

    def value(self, *series: str) -> float:
        return self.metrics.snapshot()[0][series]

    def total_s(self, *series: str) -> tuple[int, float]:
        histogram = self.metrics.snapshot()[1][series]
        return sum(histogram.counts), histogram.total_s


def test_what_a_save_waits_for_its_step_is_not_its_time():
    rig = Rig()
    rig.worker.start(ConnectorWork(saves=(SAVE,)))
    rig.now = 15.0
    rig.report(saves=(SaveResult(2, committed=True, seconds=1.0, waited=3.0),))
    assert rig.total_s("baton_kv_job_seconds", "save") == (1, 2.0)


def test_jobs_are_timed_from_start_to_result():
    rig = Rig()
    rig.worker.start(ConnectorWork(loads=(LOAD,), saves=(SAVE,)))
    assert rig.inner.pending == [LOAD, SAVE]
    rig.now = 12.0
    rig.report(loads=(LoadResult(1, 2),))
    rig.now = 15.0
    rig.report(saves=(SaveResult(2, committed=True),))
    assert rig.total_s("baton_kv_job_seconds", "load") == (1, 2.0)
    assert rig.total_s("baton_kv_job_seconds", "save") == (1, 5.0)
    assert not any(v for (name, *_), v in rig.metrics.snapshot()[0].items() if "failures" in name)


def test_a_load_and_a_save_of_one_number_are_two_jobs():
    rig = Rig()
    rig.worker.start(ConnectorWork(loads=(LOAD,)))
    rig.now = 11.0
    rig.worker.start(ConnectorWork(saves=(SaveJob(1, (b"a",), (0,)),)))
    rig.now = 13.0
    rig.report(loads=(LoadResult(1, 2),), saves=(SaveResult(1, committed=True),))
    assert rig.total_s("baton_kv_job_seconds", "load") == (1, 3.0)
    assert rig.total_s("baton_kv_job_seconds", "save") == (1, 2.0)


@pytest.mark.parametrize(
    ("results", "direction", "cause"),
    [
        ({"loads": (LoadResult(1, 1, "corrupt"),)}, "load", "corrupt"),
        ({"saves": (SaveResult(2, committed=False, error="unavailable"),)}, "save", "unavailable"),
        ({"saves": (SaveResult(2, committed=False),)}, "save", "failed"),
    ],
)
def test_failures_are_counted_by_cause(results, direction, cause):
    rig = Rig()
    rig.worker.start(ConnectorWork(loads=(LOAD,), saves=(SAVE,)))
    rig.report(**results)
    assert rig.value("baton_kv_failures", direction, cause) == 1


def test_look_ups_tell_what_they_asked_and_found():
    rig = Rig()
    rig.worker.start(ConnectorWork(lookups=(LookupJob(7, (b"a", b"b", b"c")),)))
    rig.now = 10.5
    rig.report(lookups=(LookupResult(7, 2),))
    assert rig.total_s("baton_kv_lookup_seconds") == (1, 0.5)
    assert rig.value("baton_kv_lookup_objects") == 3
    assert rig.value("baton_kv_lookup_hits") == 2


def test_a_cancelled_look_up_may_be_answered_or_not():
    rig = Rig()
    rig.worker.start(ConnectorWork(lookups=(LookupJob(7, (b"a",)), LookupJob(8, (b"a",)))))
    rig.worker.start(ConnectorWork(cancelled_lookups=(7, 8)))
    rig.report(lookups=(LookupResult(7, 1),))
    assert rig.total_s("baton_kv_lookup_seconds") == (0, 0.0)


def test_the_rest_is_passed_on():
    rig, metrics = Rig(), KvMetrics()
    rig.worker.measure(metrics, "shm")
    assert rig.inner.measured == [(metrics, "shm")]
    rig.worker.register_pool("pool", "layout", "form", "share")
    assert rig.inner.registered == ["pool", "layout", "form", "share"]
    rig.worker.set_waker(print)
    assert rig.inner._wake is print
    rig.worker.start(ConnectorWork(loads=(LOAD,)))
    rig.worker.close()
    assert not rig.inner.pending


def test_a_load_in_doubt_is_counted_when_that_is_told():
    rig = Rig()
    rig.worker.start(ConnectorWork(loads=(LOAD,)))
    rig.now = 12.0
    rig.report(doubted=(1,))
    rig.now = 99.0
    rig.report(loads=(LoadResult(1, 0, "unavailable"),))
    assert rig.total_s("baton_kv_job_seconds", "load") == (1, 2.0)
    assert rig.value("baton_kv_failures", "load", "unavailable") == 1
