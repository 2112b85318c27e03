"""Worker half of `multi://`: the jobs of each member are counted under the member's name."""

import pytest

from kvstore.guard.metrics import KvMetrics
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
from kvstore.multi.jobs import MultiResults, MultiWork
from kvstore.multi.worker import MultiWorker
from tests.support.fake_connector import FakeWorker

LOAD = LoadJob(1, (b"a", b"b"), (0, 1))
SAVE = SaveJob(2, (b"a",), (0,))
NAMES = ("shm", "redis", "redis-2")


class ScriptedWorker(FakeWorker):
    """Reports the results that the test puts into `results`."""

    def __init__(self) -> None:
        super().__init__({})
        self.results = TransferResults()
        self.measured: list[tuple[KvMetrics, str]] = []

    def start(self, work: ConnectorWork) -> None:
        self.pending += (*work.lookups, *work.loads, *work.saves)

    def measure(self, metrics: KvMetrics, backend: str) -> None:
        self.measured.append((metrics, backend))

    def poll(self) -> TransferResults:
        results, self.results = self.results, TransferResults()
        return results


class Rig:
    """A worker with three members, the second of which receives the jobs."""

    def __init__(self) -> None:
        self.members = [ScriptedWorker(), ScriptedWorker(), ScriptedWorker()]
        self.metrics = KvMetrics()
        self.now = 10.0
        self.worker = MultiWorker(self.members, ["shm", "redis", "redis"], lambda: self.now)
        self.worker.measure(self.metrics, "multi(shm,redis,redis)")

    def start(self, **work: object) -> None:
        members = [ConnectorWork(), ConnectorWork(**work), ConnectorWork()]
        self.worker.start(MultiWork(members=members))

    def report(self, **results: object) -> None:
        self.members[1].results = TransferResults(**results)
        expected = (TransferResults(), TransferResults(**results), TransferResults())
        assert self.worker.poll() == MultiResults(members=expected)

    def value(self, *series: str) -> list[float]:
        return [self.metrics.of(name).snapshot()[0][series] for name in NAMES]

    def total_s(self, *series: str) -> tuple[int, float]:
        histogram = self.metrics.of("redis").snapshot()[1][series]
        return sum(histogram.counts), histogram.total


def test_members_have_distinct_names():
    rig = Rig()
    assert [member.measured for member in rig.members] == [[(rig.metrics, name)] for name in NAMES]


def test_only_a_member_with_work_starts_it():
    rig = Rig()
    rig.start(loads=[LOAD], saves=[SAVE])
    assert [member.pending for member in rig.members] == [[], [LOAD, SAVE], []]


def test_jobs_are_timed_from_start_to_result():
    rig = Rig()
    rig.start(loads=[LOAD], saves=[SAVE])
    rig.now = 12.0
    rig.report(loads=(LoadResult(1, 2),))
    rig.now = 15.0
    rig.report(saves=(SaveResult(2, committed=True),))
    assert rig.total_s("baton_kv_job_seconds", "load") == (1, 2.0)
    assert rig.total_s("baton_kv_job_seconds", "save") == (1, 5.0)
    values = rig.metrics.of("redis").snapshot()[0]
    assert not any(value for (name, *_), value in values.items() if "failures" in name)


def test_a_load_and_a_save_with_the_same_number_are_two_jobs():
    rig = Rig()
    rig.start(loads=[LOAD])
    rig.now = 11.0
    rig.start(saves=[SaveJob(1, (b"a",), (0,))])
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
def test_failures_are_counted_by_cause_for_the_member_alone(results, direction, cause):
    rig = Rig()
    rig.start(loads=[LOAD], saves=[SAVE])
    rig.report(**results)
    assert rig.value("baton_kv_failures", direction, cause) == [0, 1, 0]


def test_lookups_count_keys_requested_and_found():
    rig = Rig()
    rig.start(lookups=[LookupJob(7, (b"a", b"b", b"c"))])
    rig.now = 10.5
    rig.report(lookups=(LookupResult(7, 2),))
    assert rig.total_s("baton_kv_lookup_seconds") == (1, 0.5)
    assert rig.value("baton_kv_lookup_objects") == [0, 3, 0]
    assert rig.value("baton_kv_lookup_hits") == [0, 2, 0]


def test_a_cancelled_look_up_is_not_counted():
    rig = Rig()
    rig.start(lookups=[LookupJob(7, (b"a",)), LookupJob(8, (b"a",))])
    rig.start(cancelled_lookups=[7, 8])
    rig.report(lookups=(LookupResult(7, 1),))
    assert rig.total_s("baton_kv_lookup_seconds") == (0, 0.0)


def test_a_load_in_doubt_is_counted_once():
    rig = Rig()
    rig.start(loads=[LOAD])
    rig.now = 12.0
    rig.report(doubted=(1,))
    rig.now = 99.0
    rig.report(loads=(LoadResult(1, 0, "unavailable"),))
    assert rig.total_s("baton_kv_job_seconds", "load") == (1, 2.0)
    assert rig.value("baton_kv_failures", "load", "unavailable") == [0, 1, 0]
