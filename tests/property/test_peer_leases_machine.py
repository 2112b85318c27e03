"""State machine of leases and reads: every job is released once, and never during a read."""

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvstore.peer.leases import BlockRead, LeaseGoneError, LeaseTable, LentBlock

LEASE_S = 10
READ_S = 4
LEASES = st.sampled_from("abcdef")
KEYS = st.lists(st.sampled_from([b"1", b"2", b"3"]), min_size=1, max_size=3, unique=True)


class LeaseMachine(RuleBasedStateMachine):
    """The model: what each lease lends, and which jobs each read depends on."""

    saves = Bundle("saves")
    reads = Bundle("reads")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = LeaseTable(LEASE_S, lambda: self.now)
        self.num_jobs = 0
        self.lent: dict[str, dict[bytes, int]] = {}  # lease -> key -> job
        self.expires: dict[str, float] = {}
        self.gone: set[str] = set()
        self.lease_jobs: dict[str, set[int]] = {}
        self.save_of: dict[int, str] = {}
        self.held: set[int] = set()  # jobs whose blocks are lent and not yet released
        self.over: set[int] = set()  # jobs whose lease has ended
        self.open: dict[BlockRead, set[int]] = {}

    def _forget(self, lease: str) -> None:
        self.over |= self.lease_jobs.pop(lease)
        self.gone.add(lease)
        del self.lent[lease], self.expires[lease]

    def _expire(self) -> None:
        for lease in [name for name, at in self.expires.items() if at <= self.now]:
            self._forget(lease)
        for read in [read for read in self.open if read.deadline <= self.now]:
            del self.open[read]

    @rule(lease=LEASES, keys=KEYS)
    def save(self, lease: str, keys: list[bytes]) -> None:
        self.end_save(self.begin_save(lease), keys, is_good=True)

    @rule(target=saves, lease=LEASES)
    def begin_save(self, lease: str) -> int:
        self.table.sweep()
        job, self.num_jobs = self.num_jobs, self.num_jobs + 1
        if lease not in self.lent and lease not in self.gone:
            self.lent[lease], self.lease_jobs[lease] = {}, set()
            self.expires[lease] = math.inf
        self.save_of[job] = lease
        self.table.begin_save(lease, job)
        return job

    @rule(job=consumes(saves), keys=KEYS, is_good=st.booleans())
    def end_save(self, job: int, keys: list[bytes], is_good: bool) -> None:
        self.table.sweep()
        lease = self.save_of.pop(job)
        blocks = [LentBlock(key, b"h" + key, job * 10 + i) for i, key in enumerate(keys)]
        is_lent = self.table.end_save(job, blocks if is_good else None)

        assert is_lent == (is_good and lease not in self.gone)
        if is_lent:
            self.held.add(job)
            self.lease_jobs[lease].add(job)
            for key in keys:
                self.lent[lease].setdefault(key, job)

    @rule(target=reads, lease=LEASES, keys=KEYS)
    def open_read(self, lease: str, keys: list[bytes]) -> object:
        if lease not in self.lent:
            with pytest.raises(LeaseGoneError):
                self.table.open_read(lease, keys, READ_S)
            return multiple()
        read = self.table.open_read(lease, keys, READ_S)
        found = [
            key for index, key in enumerate(keys) if set(keys[: index + 1]) <= set(self.lent[lease])
        ]
        assert [block.key for block in read.blocks] == found
        assert [block.object_id // 10 for block in read.blocks] == [
            self.lent[lease][k] for k in found
        ]
        self.open[read] = {block.object_id // 10 for block in read.blocks}
        return read

    @rule(read=reads)
    def copy(self, read: BlockRead) -> None:
        self.table.sweep()
        if read in self.open:
            with read.copying():
                self._check_released()
        else:
            with pytest.raises(LeaseGoneError), read.copying():
                pass

    @rule(read=reads)
    def close_read(self, read: BlockRead) -> None:
        self.table.close_read(read.read_id)
        self.open.pop(read, None)

    @rule(leases=st.lists(LEASES, unique=True))
    def renew(self, leases: list[str]) -> None:
        gone = self.table.renew(leases)
        assert gone == [lease for lease in leases if lease not in self.lent]
        for lease in set(leases) - set(gone):
            if self.expires[lease] < math.inf:
                self.expires[lease] = self.now + LEASE_S

    @rule(leases=st.lists(LEASES, unique=True))
    def offer(self, leases: list[str]) -> None:
        self.table.sweep()
        self.table.offer(leases)
        for lease in set(leases) & set(self.lent):
            self.expires[lease] = self.now + LEASE_S

    @rule(lease=LEASES)
    def end(self, lease: str) -> None:
        self.table.end([lease])
        if lease in self.lent:
            self._forget(lease)

    @rule(seconds=st.integers(1, 6))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        deadline = self.table.next_deadline
        if deadline is not None and deadline <= self.now:
            self.table.sweep()
        self._expire()

    @invariant()
    def _check_released(self) -> None:
        released = self.table.take_released().job_ids
        assert len(set(released)) == len(released)
        assert set(released) <= self.held & self.over, "a job was released early or twice"
        for jobs in self.open.values():
            assert not jobs & set(released), "a job was released during a read"
        self.held -= set(released)

    def teardown(self) -> None:
        self.table.end_all()
        for read in self.open:
            self.table.close_read(read.read_id)
        assert set(self.table.take_released().job_ids) == self.held, "a held job was not released"
        assert not self.table._headers
        assert not self.table._reads


LeaseMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLeases = LeaseMachine.TestCase


def test_an_expired_lease_is_not_found_even_before_the_sweep() -> None:
    now = [0.0]
    table = LeaseTable(LEASE_S, lambda: now[0])
    for job, lease in enumerate("ab"):
        table.begin_save(lease, job)
        table.end_save(job, [LentBlock(b"k", b"header", job)])
    now[0] = 10 * LEASE_S
    assert table.next_deadline is None, "a lease that was not offered has a deadline"
    table.offer("ab")
    now[0] = table.next_deadline or 0
    assert now[0] == 11 * LEASE_S

    with pytest.raises(LeaseGoneError):
        table.open_read("a", [b"k"], READ_S)
    assert table.renew(["b"]) == ["b"]
    assert table.take_released().job_ids == (0, 1)
    assert [table.sweep(), table.sweep()] == [2, 0], "an expiry was counted twice"


def test_a_read_keeps_what_its_lease_had_lent() -> None:
    now = [0.0]
    table = LeaseTable(LEASE_S, lambda: now[0])
    table.begin_save("a", 0)
    table.end_save(0, [LentBlock(b"k", b"header", 7)])
    closed, forgotten = (table.open_read("a", [b"k"], READ_S) for _ in range(2))
    table.end(["a"])

    table.close_read(closed.read_id)
    table.close_read(closed.read_id)
    assert not table.has_released
    with forgotten.copying():
        pass
    now[0] = READ_S
    table.sweep()
    assert table.take_released().job_ids == (0,)
    with pytest.raises(LeaseGoneError), forgotten.copying():
        pass


def test_a_blocks_header_is_kept_while_any_lease_lends_it() -> None:
    table = LeaseTable(LEASE_S, lambda: 0.0)
    for job, lease in enumerate("ab"):
        table.begin_save(lease, job)
        table.end_save(job, [LentBlock(b"k", b"header", 7)])

    table.end(["a"])
    assert table.known_header(b"k", 7) == b"header"
    assert table.known_header(b"k", 8) is None
    table.end(["b"])
    assert table.known_header(b"k", 7) is None


def test_tail_slots_are_released_with_their_jobs() -> None:
    table = LeaseTable(LEASE_S, lambda: 0.0)
    table.begin_save("a", 0)
    table.end_save(0, [LentBlock(b"k", b"header", 7, tail_slot=3)])
    assert table.known_header(b"k", 7) is None, "a tail's header was returned for its block"

    table.end(["a"])
    released = table.take_released()
    assert released.job_ids == (0,)
    assert released.tail_slots == (3,)
