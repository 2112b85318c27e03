"""`QueueingRouter`: a router in which requests wait, take turns and are refused, as in a real one.

What decides over them is the router's code: `Admission`, `Backlog`, `WaitingRequests` and
`ReplicaLoad`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from baton.common.errors import DeadlineExceededError, ResourceExhaustedError
from baton.common.request.slo import NO_SLO, Slo
from baton.v1 import worker_pb2
from benchmarks.router.simulation.decode import SimulatedDecode
from benchmarks.router.simulation.prefill import SimulatedPrefill
from benchmarks.router.simulation.requests import SimulatedRequest
from benchmarks.router.simulation.router import Placed, SimulatedRouter
from router.fleet.fair_shares import Share
from router.fleet.waiting import Turn, WaitingRequests
from router.routing.policy import RoutingPolicy
from router.stages.admission import Admission
from router.stages.backlog import Backlog
from router.stages.place import Place

__all__ = ["QueueingRouter", "TenantRequest"]

_QUEUE_TIMEOUT_S = 30.0
_MAX_LOCAL_PREFILL_TOKENS = 0
"""Prefill computes all prompts, so that one can tell what it computed in vain."""


@dataclass(slots=True, eq=False, kw_only=True)
class TenantRequest(SimulatedRequest):
    """A request of a tenant, and what became of it.

    Attributes:
        tenant: its tenant's name.
        weight: its tenant's weight.
        timeout_s: its deadline, from its arrival.
        slo: its objectives.
        is_return: whether it was refused before.
        ended_at: when it was answered or refused.
        outcome: "done", or the reason why not.
        retry_after_s: when the client may come back, if it was refused.
    """

    tenant: str
    weight: int
    timeout_s: float
    slo: Slo = NO_SLO
    is_return: bool = False
    ended_at: float = field(default=0.0, init=False)
    outcome: str = field(default="", init=False)
    retry_after_s: float | None = field(default=None, init=False)


class QueueingRouter(SimulatedRouter):
    """A router before which requests wait.

    Args:
        policy: chooses among replicas.
        prefill: the replicas of the prefill tier.
        decode: the replicas of the decode tier.
        limits_sending: whether requests wait in the router until one would start soon, as they do
            in the router proper. Otherwise they wait in the queues of the replicas.
        is_fair: whether the router distinguishes tenants.

    Attributes:
        ended: the requests that have ended.
        max_held: the most requests that ran or waited at once.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        prefill: Sequence[SimulatedPrefill],
        decode: Sequence[SimulatedDecode],
        *,
        limits_sending: bool = True,
        is_fair: bool = True,
    ) -> None:
        super().__init__(policy, prefill, decode, _MAX_LOCAL_PREFILL_TOKENS)
        self._limits_sending = limits_sending
        self._is_fair = is_fair
        self._waiting = WaitingRequests(self._clock)
        num_seats = sum(replica.machine.num_seats for replica in decode)
        self._admission = Admission()
        self._admission.read_num_seats = lambda: num_seats
        self._backlog = Backlog(
            lambda: num_seats,
            clock=self._clock,
            full_step_s=lambda: max(self.loads[id_].report.decode_step_s for id_ in self._decode),
        )
        self.ended: list[TenantRequest] = []
        self.max_held = 0
        self._num_requests = 0

    @property
    def num_accounts(self) -> int:
        """Tenants of which the queue remembers anything."""
        return len(self._waiting.shares)

    @override
    def take_report(self, worker_id: str, report: worker_pb2.WorkerLoad) -> None:
        super().take_report(worker_id, report)
        self._waiting.offer()

    async def serve_or_refuse(self, request: TenantRequest) -> None:
        """Runs a request to its end, or refuses it."""
        request.arrival_s = self._clock()
        try:
            self._check(request)
            async with asyncio.timeout(request.timeout_s):
                await self._serve_in_turn(request)
            request.outcome = "done"
        except (ResourceExhaustedError, DeadlineExceededError) as error:
            request.outcome, request.retry_after_s = str(error.reason), error.retry_after_s
        except TimeoutError:
            request.outcome = "late"
        request.ended_at = self._clock()
        self.ended.append(request)

    def _check(self, request: TenantRequest) -> None:
        num_tokens, share = request.num_output_tokens, self._share(request)
        self._backlog.check(0, request.timeout_s, num_tokens, share=share, slo=request.slo)

    def _share(self, request: TenantRequest, num_tokens: float = 0.0) -> Share:
        tenant, weight = (request.tenant, request.weight) if self._is_fair else ("", 1)
        return Share(tenant, weight, num_tokens)

    async def _serve_in_turn(self, request: TenantRequest) -> None:
        self._num_requests += 1
        with (
            self._admission.admit(str(self._num_requests), request.tenant, request.weight),
            self._backlog.place(0, self._share(request)) as place,
        ):
            self.max_held = max(self.max_held, self._admission.num_running)
            num_output_tokens = self._backlog.expected_tokens(request.num_output_tokens)
            share = self._share(request, request.num_tokens + num_output_tokens)
            placed = await self._find(request, share)
            has_waited, num_used = self._clock() > request.arrival_s, 0
            try:
                if has_waited:
                    self._check_start(request)
                num_used = request.num_tokens + request.num_output_tokens
                await self._run(request, placed, place)
            finally:
                if has_waited:
                    self._waiting.shares.settle(share, num_used)

    async def _find(self, request: TenantRequest, share: Share) -> Placed:
        turn = Turn(True, 0, request.arrival_s + request.timeout_s, share)
        placed = await self._waiting.wait(
            lambda: self._try_to_place(request),
            turn,
            _QUEUE_TIMEOUT_S,
            lambda: "decode",
            lambda: True,
        )
        assert placed is not None, "a request may wait up to its deadline"
        return placed

    def _try_to_place(self, request: TenantRequest) -> Placed | None:
        """Chooses the replicas of a request; None if it has to wait."""
        decode_ids = [id_ for id_ in self._decode if self.loads[id_].has_room]
        if self._limits_sending:
            if not any(self.loads[id_].may_queue_prompt for id_ in self._prefill):
                return None
            num_blocks = self._num_blocks(request)
            decode_ids = [id_ for id_ in decode_ids if self.loads[id_].may_start(num_blocks)]
        return self.place(request, decode_ids) if decode_ids else None

    def _check_start(self, request: TenantRequest) -> None:
        left_s = request.arrival_s + request.timeout_s - self._clock()
        self._backlog.check_start(left_s, request.num_output_tokens)

    async def _run(self, request: TenantRequest, placed: Placed, place: Place) -> None:
        def note_first_token() -> None:
            self._backlog.note_first_token(place)
            self._waiting.offer()

        try:
            await self.run(request, placed, note_first_token, lambda: self._backlog.begin(place))
        finally:
            place.num_tokens = request.num_generated
            self._waiting.offer()
