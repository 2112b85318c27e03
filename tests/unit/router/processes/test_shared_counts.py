"""Counts of limits that processes share: no limit is exceeded, and nothing is held for the dead."""

import errno
import os
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from baton.common.errors import ConfigurationError, Reason, ResourceExhaustedError
from router.config.tenants import TenantPolicy
from router.processes.place import ProcessPlace
from router.processes.shared_counts import (
    SharedAccounts,
    create_shared_counts,
    shared_counts_bytes,
)
from router.stages.admission import Admission
from router.tenants.tenant import Tenant
from router.tenants.token_bucket import TokenBucket
from tests.support.tenants import Clock

NUM_PROCESSES = 3
MAX_RUNNING, PER_MINUTE = 2, 5
NAMES = ("a", "b")
Running = tuple[int, str, AbstractContextManager[None]]
"""A request: its process, its tenant, and what ends it."""


class Processes:
    """The tables of processes, as each of them maps them."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        create_shared_counts(folder, NUM_PROCESSES, num_buckets=32)
        self._folder = folder
        self._clock = clock
        self.tables: dict[int, SharedAccounts] = {}

    def start(self, number: int) -> SharedAccounts:
        place = ProcessPlace(number, NUM_PROCESSES, str(self._folder))
        self.tables[number] = SharedAccounts(place, self._clock)
        return self.tables[number]

    def die(self, number: int) -> None:
        """Ends a process as the kernel would: its files are closed, and nothing is given back."""
        self.tables.pop(number).close()

    def close(self) -> None:
        for number in list(self.tables):
            self.die(number)


@pytest.fixture
def processes(tmp_path: Path):
    opened = Processes(tmp_path, Clock())
    yield opened
    opened.close()


def tenant_of(table: SharedAccounts, name: str, clock: Clock, **limits: object) -> Tenant:
    policy = TenantPolicy(name=name, **limits)
    return Tenant(name, policy, clock, account=table.account("tenant", name))


def refusal_of(running: AbstractContextManager[None]) -> ResourceExhaustedError | None:
    try:
        running.__enter__()
    except ResourceExhaustedError as error:
        return error
    return None


class LimitsMachine(RuleBasedStateMachine):
    """Requests begin and end in processes that die and return. A model knows who runs, and has the
    bucket of each tenant in one place.
    """

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.mkdtemp()
        self._clock = Clock()
        self._processes = Processes(Path(self._folder), self._clock)
        self._running: list[Running] = []
        self._buckets = {name: TokenBucket(PER_MINUTE, self._clock()) for name in NAMES}
        for number in range(NUM_PROCESSES):
            self._processes.start(number)

    def teardown(self) -> None:
        self._processes.close()
        shutil.rmtree(self._folder)

    @rule(target=requests, number=st.integers(0, NUM_PROCESSES - 1), name=st.sampled_from(NAMES))
    def begin(self, number: int, name: str) -> Running | None:
        table = self._processes.tables.get(number)
        if table is None:
            return None
        limits = {"max_concurrent_requests": MAX_RUNNING, "requests_per_minute": PER_MINUTE}
        running = tenant_of(table, name, self._clock, **limits).running()
        num_running = sum(one[1] == name for one in self._running)
        bucket, now = self._buckets[name], self._clock()
        if (refusal := refusal_of(running)) is not None:
            if refusal.reason == Reason.CLIENT_CONCURRENCY:
                assert num_running == MAX_RUNNING
            else:
                assert refusal.retry_after_s == pytest.approx(bucket.wait_s(1, now), abs=1e-5)
            return None
        assert num_running < MAX_RUNNING
        assert bucket.wait_s(1, now) == 0
        bucket.take(1, now)
        self._running.append((number, name, running))
        return self._running[-1]

    @rule(request=consumes(requests))
    def end(self, request) -> None:
        if request not in self._running:
            return  # it was refused, or its process has died
        request[2].__exit__(None, None, None)
        self._running.remove(request)

    @rule(number=st.integers(0, NUM_PROCESSES - 1))
    def die_or_return(self, number: int) -> None:
        if number in self._processes.tables:
            self._processes.die(number)
            self._running = [one for one in self._running if one[0] != number]
        else:
            self._processes.start(number)

    @rule(seconds=st.floats(0, 70))
    def wait(self, seconds: float) -> None:
        self._clock.now += seconds

    @invariant()
    def nobody_is_above_the_limit(self) -> None:
        for name in NAMES:
            assert sum(one[1] == name for one in self._running) <= MAX_RUNNING


LimitsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLimits = LimitsMachine.TestCase


def test_a_folder_without_room_is_refused_before_anything_counts(tmp_path, monkeypatch):
    def refuse(descriptor, offset, num_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigurationError, match=r"4194304 bytes, .*: No space left on device"):
        create_shared_counts(tmp_path, 2)


def test_the_table_has_its_memory_before_anything_counts(tmp_path):
    create_shared_counts(tmp_path, 2)
    table = (tmp_path / "counts").stat()
    assert table.st_blocks * 512 >= table.st_size == shared_counts_bytes(2)


def test_an_id_is_taken_in_all_processes_until_its_request_ends_or_its_process_dies(processes):
    first, second = (processes.start(i).running_ids("request") for i in range(2))
    assert first.begin("tenant", "id")
    assert not first.begin("tenant", "id")
    assert not second.begin("tenant", "id")
    assert second.begin("other", "id")
    assert processes.tables[1].running_ids("http").begin("tenant", "id")
    first.end("tenant", "id")
    assert second.begin("tenant", "id")
    processes.die(1)
    assert first.begin("tenant", "id")


def test_rows_are_free_again_when_nothing_uses_them(processes, caplog):
    ids = processes.start(0).running_ids("request")
    for number in range(2000):  # four times as many as there are rows
        assert ids.begin("", str(number))
        ids.end("", str(number))
    assert not caplog.text


def test_a_client_without_a_row_is_counted_by_each_process_until_there_is_one(processes, caplog):
    first, second = processes.start(0), processes.start(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedAccounts, "_find", lambda self, bucket, key: None)
        here, there = (table.account("tenant", "a") for table in (first, second))
        for account in (here, there):
            with account.open() as counts:
                assert counts.has_room(1, 1)
                counts.add_running(1)
                assert not counts.has_room(1, 1)
    with here.open() as counts:  # it must be taken from where it was counted
        counts.add_running(-1)
    with here.open() as counts:
        counts.add_running(1)
    third = second.account("tenant", "a")
    with third.open() as counts:
        assert counts.num_running == 1


def test_a_client_without_a_row_keeps_its_rate(processes, monkeypatch):
    monkeypatch.setattr(SharedAccounts, "_find", lambda self, bucket, key: None)
    tenant = tenant_of(processes.start(0), "a", processes._clock, requests_per_minute=1)
    with tenant.running():
        pass
    with pytest.raises(ResourceExhaustedError, match="1 requests per minute"):
        tenant.running().__enter__()


def test_a_lock_that_is_not_released_is_waited_for_a_few_milliseconds(processes, caplog):
    first, second = processes.start(0), processes.start(1)
    with first.account("tenant", "a").open() as held:
        held.add_running(1)
        with second.account("tenant", "a").open() as counts:
            assert counts.num_running == 1
    assert "does not release a lock" in caplog.text


def test_a_changed_rate_keeps_what_was_used_by_all(processes):
    clock = processes._clock
    first, second = processes.start(0), processes.start(1)
    with tenant_of(first, "a", clock, requests_per_minute=2).running():
        pass
    lower = tenant_of(second, "a", clock, requests_per_minute=1)
    with lower.running():  # one request of the first limit was left
        pass
    with pytest.raises(ResourceExhaustedError, match="1 requests per minute"):
        lower.running().__enter__()


def test_a_clients_share_of_the_places_is_that_of_all_processes(processes: Processes):
    """The places are those of the whole router, too: spread over its processes, a client must not
    get a share in each of them.
    """
    admissions = [Admission(100, processes.start(number)) for number in range(NUM_PROCESSES)]
    admitted = [
        admissions[number % NUM_PROCESSES].admit(f"flood-{number}", "flood")
        for number in range(100)
    ]
    running = [request for request in admitted if refusal_of(request) is None]
    assert len(running) == 80
    other = admissions[0].admit("other", "other")
    assert refusal_of(other) is None
    processes.die(1)
    for request in (*running, other):
        request.__exit__(None, None, None)
    assert [admission.num_running for admission in admissions] == [0] * NUM_PROCESSES
    assert refusal_of(admissions[2].admit("again", "flood")) is None
