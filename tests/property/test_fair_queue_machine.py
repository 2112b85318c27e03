"""`WaitingRequests` shares what becomes free among tenants, whatever comes and goes meanwhile."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.router.simulation.virtual_time import VirtualTimeLoop
from router.fleet.fair_shares import QUANTUM_TOKENS, Share
from router.fleet.waiting import Turn, WaitingRequests

TENANTS = {"a": 1, "b": 2, "c": 5}
NEEDS = ("chat", "grammar")
MAX_TOKENS = 2000
QUEUE_TIMEOUT_S = 50.0


@dataclass(eq=False)
class Request:
    name: int
    tenant: str
    need: str
    priority: int
    num_tokens: int
    last_start: float
    has_waited: bool = False
    task: "asyncio.Task[bool | None]" = field(init=False)

    @property
    def order(self) -> tuple[float, int]:
        return self.last_start, self.name


class FairQueueMachine(RuleBasedStateMachine):
    """Requests of three tenants come, leave, and take seats of two kinds as these become free."""

    @initialize()
    def start(self) -> None:
        self.loop = VirtualTimeLoop()
        self.waiting = WaitingRequests(self.loop.time)
        self.free = dict.fromkeys(NEEDS, 0)
        self.requests: list[Request] = []
        self.number = 0
        # What tenants got since when all of them have had waiting requests of equal urgency.
        self.served: dict[str, float] = dict.fromkeys(TENANTS, 0.0)

    def run(self, *actions: Callable[[], object]) -> None:
        """Does something within the loop, and lets all that can run do so."""

        async def settle() -> None:
            for action in actions:
                action()
            for _ in range(40):
                await asyncio.sleep(0)

        self.loop.run_until_complete(settle())

    @rule(
        tenant=st.sampled_from(sorted(TENANTS)),
        need=st.sampled_from(NEEDS),
        priority=st.integers(0, 1),
        num_tokens=st.sampled_from((1, 300, MAX_TOKENS)),
        timeout_s=st.sampled_from((5.0, 20.0, 600.0)),
        number=st.integers(1, 6),
    )
    def arrive(self, tenant, need, priority, num_tokens, timeout_s, number):
        for _ in range(number):
            self._arrive(tenant, need, priority, num_tokens, timeout_s)
        self.run()

    @rule(need=st.sampled_from(NEEDS), num_tokens=st.sampled_from((300, MAX_TOKENS)))
    def all_tenants_arrive(self, need, num_tokens):
        for tenant in TENANTS:
            for _ in range(12):
                self._arrive(tenant, need, 0, num_tokens, 600.0)
        self.run()

    def _arrive(self, tenant, need, priority, num_tokens, timeout_s):
        now = self.loop.time()
        request = Request(
            self.number, tenant, need, priority, num_tokens, now + min(timeout_s, QUEUE_TIMEOUT_S)
        )
        self.number += 1
        turn = Turn(True, priority, now + timeout_s, Share(tenant, TENANTS[tenant], num_tokens))
        request.task = self.loop.create_task(self._wait(request, turn, timeout_s))
        self.requests.append(request)

    async def _wait(self, request: Request, turn: Turn, timeout_s: float) -> bool | None:
        self.loop.call_soon(setattr, request, "has_waited", True)
        find = lambda: True if self.free[request.need] else None  # noqa: E731
        try:
            async with asyncio.timeout(timeout_s):
                found = await self.waiting.wait(find, turn, QUEUE_TIMEOUT_S, lambda: request.need)
        except TimeoutError:
            found = None
        if found:
            assert self.free[request.need], "two requests found one seat"
            self.free[request.need] -= 1
            self._check_turn(request)
        self.requests.remove(request)
        return found

    def _check_turn(self, request: Request) -> None:
        """Checks that a request that goes on was the first of those that compete with it."""
        others = [each for each in self.requests if each is not request and not each.task.done()]
        rivals = [each for each in others if each.need == request.need]
        assert all(each.priority >= request.priority for each in rivals)
        equal = [each for each in rivals if each.priority == request.priority]
        own = [each for each in equal if each.tenant == request.tenant]
        assert all(each.order > request.order for each in own)
        waiting = {each.tenant for each in equal} | {request.tenant}
        is_contest = len({each.need for each in others} | {request.need}) == 1
        if waiting == set(TENANTS) and is_contest and request.has_waited:
            self.served[request.tenant] += request.num_tokens
        else:
            self.served = dict.fromkeys(TENANTS, 0.0)

    @rule(need=st.sampled_from(NEEDS), number=st.integers(1, 12))
    def free_seats(self, need, number):
        self.free[need] += number
        self.run(self.waiting.offer)

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 100), also_frees=st.booleans())
    def leave(self, index, also_frees):
        """A client leaves, perhaps at the moment at which a seat becomes free."""
        request = self.requests[index % len(self.requests)]
        actions: list[Callable[[], object]] = [request.task.cancel]
        if also_frees:
            self.free[request.need] += 1
            actions.insert(0, self.waiting.offer)
        self.run(*actions)
        if request in self.requests:  # cancelled before its first step
            self.requests.remove(request)
        self.served = dict.fromkeys(TENANTS, 0.0)

    @rule(seconds=st.sampled_from((1.0, 6.0, 30.0)))
    def pass_time(self, seconds):
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.run()
        now = self.loop.time()
        assert all(each.last_start >= now - 1e-6 for each in self.requests), (
            "one outstayed its time"
        )
        self.served = dict.fromkeys(TENANTS, 0.0)

    @rule()
    def regroup(self):
        self.run(self.waiting.regroup)

    @invariant()
    def nobody_is_lost(self):
        if not hasattr(self, "waiting"):
            return
        assert len(self.waiting) == len(self.requests)
        for request in self.requests:
            assert not self.free[request.need], "a request waits for what is free"
        assert len(self.waiting.shares) <= len(TENANTS)
        if not self.requests:
            assert len(self.waiting.shares) == 0

    @invariant()
    def tenants_get_what_their_weights_say(self):
        """Tenants that all wait get the same per weight, to within a quantum and a request."""
        if not hasattr(self, "served"):
            return
        rounds = {tenant: self.served[tenant] / weight for tenant, weight in TENANTS.items()}
        bound = QUANTUM_TOKENS + MAX_TOKENS
        assert max(rounds.values()) - min(rounds.values()) <= 2 * bound

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        for request in list(self.requests):
            request.task.cancel()
        self.run()
        assert len(self.waiting) == 0
        self.loop.close()


TestFairQueueMachine = FairQueueMachine.TestCase
TestFairQueueMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
