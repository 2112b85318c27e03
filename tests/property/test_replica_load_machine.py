"""`ReplicaLoad` against a worker that requests reach late, and whose reports come late.

Whatever the order, a load is never believed for longer than until the first report that was made
after it had gone, and what is there is never missing.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.v1 import worker_pb2
from router.fleet.replica_load import ReplicaLoad

TOKEN_S = 0.001
TRANSIT_S = 0.1
TOKENS = st.integers(1, 50)


@dataclass
class Own:
    """A request of the router.

    `is_taken` once a report came that seemed to include it, and `is_mistaken` if that report was
    late and did not.
    """

    num_tokens: int
    sent_at: float
    deadline: float
    is_taken: bool = False
    is_mistaken: bool = False


class ReplicaLoadMachine(RuleBasedStateMachine):
    """One router, one worker, and requests of other routers there."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        info = worker_pb2.GetInfoResponse(
            worker_id="w", num_blocks=1000, block_size=4, pool_block_size=4, max_num_seqs=8
        )
        self.load = ReplicaLoad(info, clock=lambda: self.now)
        self.own: dict[int, Own] = {}
        self.ends: dict[int, ExitStack] = {}
        self.send_of: dict[int, Callable[[], None]] = {}
        self.others = 0  # tokens of other routers' requests in the worker
        self.reports: list[tuple[float, worker_pb2.WorkerLoad, set[int]]] = []  # on their way
        self.seen: set[int] = set()  # own requests in the last report
        self.reported_others = 0
        self.count = 0
        self.taken_at = -math.inf  # of the last report
        self._deliver(self._report())

    # The router.

    @rule(num_tokens=TOKENS, is_sent=st.booleans(), lasts_s=st.sampled_from((0.5, 5.0, math.inf)))
    def dispatch(self, num_tokens, is_sent, lasts_s):
        self.count += 1
        stack = self.ends[self.count] = ExitStack()
        deadline = self.now + lasts_s
        self.send_of[self.count] = stack.enter_context(
            self.load.reserve(num_tokens, num_tokens, is_sent=is_sent, deadline=deadline)
        )
        sent_at = self.now if is_sent else math.inf
        self.own[self.count] = Own(num_tokens, sent_at, deadline)

    @precondition(lambda self: any(own.sent_at == math.inf for own in self.own.values()))
    @rule(data=st.data())
    def send(self, data):
        """A request that was reserved first, for example while another replica lent a prefix."""
        waiting = [number for number, own in self.own.items() if own.sent_at == math.inf]
        number = data.draw(st.sampled_from(waiting))
        self.send_of[number]()
        self.own[number].sent_at = self.now

    @precondition(lambda self: self.ends)
    @rule(data=st.data())
    def end(self, data):
        """A first token, an error, a loss or a client that leaves: the router knows it at once."""
        number = data.draw(st.sampled_from(sorted(self.ends)))
        self.ends.pop(number).close()
        del self.own[number]

    # The worker.

    @rule(seconds=st.sampled_from((0.01, 0.05, 0.2, 1.0)))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(num_tokens=st.integers(0, 100))
    def others_change(self, num_tokens):
        self.others = num_tokens

    @rule(age_s=st.sampled_from((0.0, 0.0, 0.02, 0.5)))
    def report_now(self, age_s):
        """The report arrives at once."""
        self._deliver(self._report(age_s))

    @rule()
    def report_late(self):
        self.reports.append(self._report())

    @precondition(lambda self: self.reports)
    @rule()
    def deliver_late(self):
        self._deliver(self.reports.pop(0))

    def _report(self, age_s=0.0):
        """A report of the requests that had arrived `age_s` ago, or later: none is older than one
        before it.
        """
        taken_at = self.taken_at = max(self.taken_at, self.now - age_s)
        age_s = self.now - taken_at
        there = {n for n, own in self.own.items() if own.sent_at <= taken_at - TRANSIT_S}
        num_tokens = self.others + sum(self.own[number].num_tokens for number in there)
        report = worker_pb2.WorkerLoad(
            num_running=len(there) + self.others // 10,
            num_queued_tokens=num_tokens,
            queued_prompt_s=num_tokens * TOKEN_S,
            num_free_blocks=1000 - num_tokens,
            num_blocks=1000,
            prompt_token_s=TOKEN_S,
            age_s=age_s,
        )
        return taken_at, report, there, self.others

    def _deliver(self, message):
        taken_at, report, there, others = message
        self.load.take(report)
        self.delivered_late = taken_at + report.age_s < self.now
        self.report, self.seen, self.reported_others = report, there, others
        # What a report may include counts as included if it is not late.
        arrived_by = self.now - report.age_s - TRANSIT_S
        for number, own in self.own.items():
            if own.sent_at <= arrived_by and not own.is_taken:
                own.is_taken, own.is_mistaken = True, number not in there

    # What must hold.

    @invariant()
    def the_load_is_the_report_and_what_is_on_its_way(self):
        live = [own for own in self.own.values() if own.deadline > self.now]
        on_way = [own for own in live if not own.is_taken]
        candidate = self.load.candidate(1.0)
        expected = self.report.num_queued_tokens + sum(own.num_tokens for own in on_way)
        assert candidate.num_queued_tokens == expected
        assert math.isclose(candidate.queue_s, expected * TOKEN_S, abs_tol=1e-9)
        assert candidate.num_requests == max(self.report.num_running + len(on_way), len(live))
        assert 0 <= candidate.num_free_blocks <= 1000

    @invariant()
    def nothing_is_missing_after_a_report_in_time(self):
        if self.delivered_late:
            return
        there = self.load.candidate(1.0).num_queued_tokens
        unseen = (
            own.num_tokens
            for number, own in self.own.items()
            if own.deadline > self.now and number not in self.seen and not own.is_mistaken
        )
        assert there >= self.reported_others + sum(unseen)

    def teardown(self):
        """Once all has ended, one report leaves nothing."""
        for stack in self.ends.values():
            stack.close()
        self.own.clear()
        self.others = 0
        self._deliver(self._report())
        candidate = self.load.candidate(1.0)
        assert (candidate.num_requests, candidate.num_queued_tokens) == (0, 0)
        assert (candidate.queue_s, candidate.num_free_blocks) == (0.0, 1000)
        assert not self.load._live
        assert not self.load._on_way


TestReplicaLoad = ReplicaLoadMachine.TestCase
TestReplicaLoad.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
