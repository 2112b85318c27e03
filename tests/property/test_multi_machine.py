"""State machine of a connector over several members, whose jobs end in any order and any way.

The machine checks that each job has one result; that a load's valid blocks have the right keys
and are written by one member at a time; that a member that did not answer is not tried again, and
all others are tried before a load ends short; and that blocks are released once, after the last
member has read them.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.jobs import LoadJob, LookupJob, SaveJob
from tests.support.fake_members import FakeMember, Members

_ALL = tuple(bytes([number]) * 32 for number in range(6))
_KEYS = st.lists(st.sampled_from(_ALL), min_size=1, max_size=4, unique=True)
_FINAL_ERRORS = ("unavailable", "timed out", "failed", "cancelled")
_ERRORS = st.sampled_from(("missing", "corrupt", *_FINAL_ERRORS))


class MultiMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.peer = FakeMember("peer", finds_by_key=False)
        self.far = FakeMember("far")
        self.near = FakeMember("near", carries_handoffs=False)
        self.all = Members(self.peer, self.far, self.near)
        self.next_block = 0
        self.pool = {}
        self.loads = {}  # job: (keys, blocks, has a handoff)
        self.cancelled = set()
        self.answers = {}  # last block of a load: [(member, first key, valid blocks, error)]
        self.saves = {}  # job: blocks
        self.lookups = {}  # job: keys
        self.held = set()
        self.ended_saves = {}  # blocks of a save: results of its members

    def blocks(self, count):
        self.next_block += count
        return tuple(range(self.next_block - count, self.next_block))

    def pending(self, kind):
        return [
            (member, job)
            for member in self.all.members
            for job in member.pending
            if isinstance(job, kind)
        ]

    # Jobs of the engine.

    @rule(keys=_KEYS)
    def look_up(self, keys):
        self.lookups[self.all.scheduler.lookup(keys)] = keys

    @precondition(lambda self: self.lookups)
    @rule(data=st.data())
    def forget(self, data):
        job_id = data.draw(st.sampled_from(sorted(self.lookups)))
        del self.lookups[job_id]
        self.all.scheduler.forget_lookup(job_id)

    @rule(keys=_KEYS, has_handoff=st.booleans())
    def load(self, keys, has_handoff):
        blocks = self.blocks(len(keys))
        handoff = self.all.scheduler.make_handoff("h", b"n", keys, 9) if has_handoff else None
        job_id = self.all.scheduler.load(keys, blocks, handoff)
        self.loads[job_id] = (tuple(keys), blocks, has_handoff)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def cancel(self, data):
        job_id = data.draw(st.sampled_from(sorted(self.loads)))
        self.cancelled.add(job_id)
        self.all.scheduler.cancel_load(job_id)

    @rule(keys=_KEYS)
    def save(self, keys):
        blocks = self.blocks(len(keys))
        job_id = self.all.scheduler.save(keys, blocks, lease_id="h")
        self.saves[job_id] = blocks
        self.ended_saves[blocks] = {}

    # Ends of members' jobs.

    @precondition(lambda self: self.pending(LookupJob))
    @rule(data=st.data())
    def answer(self, data):
        member, job = data.draw(st.sampled_from(self.pending(LookupJob)))
        member.answer(job)

    @precondition(lambda self: self.pending(LoadJob))
    @rule(data=st.data(), fails=st.booleans(), error=_ERRORS)
    def end_load(self, data, fails, error):
        member, job = data.draw(st.sampled_from(self.pending(LoadJob)))
        num_good = member.num_leading(job.keys)
        if fails and num_good:
            num_good = data.draw(st.integers(0, num_good - 1))
        for index, block in enumerate(job.block_ids):
            self.pool[block] = job.keys[index] if index < num_good else "garbage"
        is_whole = num_good == len(job.keys)
        error = "" if is_whole else error if fails else "missing"
        member.end_load(job, num_good, error)
        self.answers.setdefault(job.block_ids[-1], []).append(
            (member.name, job.keys[0], num_good, error)
        )

    @precondition(lambda self: self.pending(SaveJob))
    @rule(data=st.data(), committed=st.booleans())
    def end_save(self, data, committed):
        member, job = data.draw(st.sampled_from(self.pending(SaveJob)))
        is_held = committed and member is self.peer
        member.end_save(job, committed=committed, is_held=is_held)
        self.ended_saves[job.block_ids][member.name] = "held" if is_held else committed

    @precondition(lambda self: self.peer.held)
    @rule(data=st.data())
    def release(self, data):
        self.peer.release(data.draw(st.sampled_from(self.peer.held)))

    @rule(keys=_KEYS, data=st.data())
    def evict(self, keys, data):
        data.draw(st.sampled_from(self.all.members)).objects -= set(keys)

    @rule(owners=st.lists(st.integers(0, 2), min_size=6, max_size=6))
    def scatter(self, owners):
        """Gives each key to one member, as if another engine had saved it there."""
        for index, member in enumerate(self.all.members):
            member.objects = {
                key for key, owner in zip(_ALL, owners, strict=True) if owner == index
            }

    # Results for the engine.

    @rule()
    def step(self):
        held_before = set(self.held)
        results = self.all.step()
        for answer in results.lookups:
            if answer.job_id in self.lookups:
                assert self.all.scheduler.num_found(answer.job_id) == answer.num_blocks
                assert answer.num_blocks <= len(self.lookups[answer.job_id])
        for result in results.loads:
            self.check_load(result)
        for result in results.saves:
            self.check_save(result)
        for job_id in results.released:
            assert job_id in held_before | self.held
            self.held.remove(job_id)

    def check_load(self, result):
        keys, blocks, has_handoff = self.loads.pop(result.job_id)
        num_good = result.num_blocks
        assert tuple(self.pool[block] for block in blocks[:num_good]) == keys[:num_good]
        assert bool(result.error) == (num_good < len(keys))
        answers = self.answers.pop(blocks[-1], [])
        lost = [name for name, _, _, error in answers if error in _FINAL_ERRORS]
        assert len(lost) == len(set(lost)), "a member that did not answer was tried again"
        if num_good < len(keys) and result.job_id not in self.cancelled:
            ends = [(name, keys.index(first) + count) for name, first, count, _ in answers]
            lacking = {name for name, end in ends if end == num_good}
            sources = {"peer", "far", "near"} if has_handoff else {"far", "near"}
            assert lacking | set(lost) == sources, "a source was not tried"

    def check_save(self, result):
        outcomes = self.ended_saves.pop(self.saves.pop(result.job_id))
        assert len(outcomes) == 3, "a member may still read the blocks"
        if result.is_held:
            assert outcomes["peer"] == "held"
            self.held.add(result.job_id)
        if result.committed:
            assert outcomes["far"] is True or result.is_held
        else:
            assert outcomes["far"] is False

    @invariant()
    def one_member_at_a_time_writes_to_a_block(self):
        blocks = [block for _, job in self.pending(LoadJob) for block in job.block_ids]
        assert len(blocks) == len(set(blocks))

    def end_all(self):
        for member, job in self.pending(LookupJob):
            member.answer(job)
        for member, job in self.pending(LoadJob):
            member.end_load(job, 0, "unavailable")
            answer = (member.name, job.keys[0], 0, "unavailable")
            self.answers.setdefault(job.block_ids[-1], []).append(answer)
        for member, job in self.pending(SaveJob):
            member.end_save(job, committed=False)
            self.ended_saves[job.block_ids][member.name] = False
        for job_id in list(self.peer.held):
            self.peer.release(job_id)

    def teardown(self):
        """All jobs end."""
        for _ in range(6):  # more rounds than a job has members to try
            self.end_all()
            self.step()
        assert not self.loads
        assert not self.saves
        assert not self.held
        for job_id in self.lookups:
            assert self.all.scheduler.num_found(job_id) is not None
            self.all.scheduler.forget_lookup(job_id)
        scheduler = self.all.scheduler
        assert not any((scheduler._lookups, scheduler._loads, scheduler._saves))
        assert not any(member.loads or member.saves for member in scheduler._members)


MultiMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestMultiMachine = MultiMachine.TestCase
