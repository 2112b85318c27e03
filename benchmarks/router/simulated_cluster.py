"""`SimulatedCluster`: prefill and decode replicas behind the router's own queue and its estimates.

What decides over requests is the router's code: `Backlog`, `Admission`, `WaitingRequests` and
`ReplicaLoad`. The replicas are simulated: prefill computes prompts one after the other, decode
gives each running sequence a token per step, first come, first served.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from baton.common.errors import DeadlineExceededError, ResourceExhaustedError
from baton.common.request.slo import NO_SLO, Slo
from baton.v1 import worker_pb2
from router.fleet.fair_shares import Share
from router.fleet.replica_load import ReplicaLoad
from router.fleet.waiting import Turn, WaitingRequests
from router.stages.admission import Admission
from router.stages.backlog import Backlog, Place

__all__ = ["Job", "Machines", "SimulatedCluster"]

_REPORT_INTERVAL_S = 0.1
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Machines:
    """The simulated replicas.

    Attributes:
        num_prefill: prefill replicas.
        prefill_tokens_per_s: what each of them computes.
        num_decode: decode replicas.
        num_seats: sequences that each of them runs.
        step_s: the time of a decode step, but for its sequences.
        sequence_s: what each sequence adds to a step.
        num_blocks: blocks of each decode replica, of 16 tokens.
        max_num_requests: requests that a decode replica runs and queues.
    """

    num_prefill: int = 1
    prefill_tokens_per_s: float = 20_000.0
    num_decode: int = 2
    num_seats: int = 16
    step_s: float = 0.01
    sequence_s: float = 0.0005
    num_blocks: int = 1024
    max_num_requests: int = 4096

    def decode_rate(self, num_tokens: float) -> float:
        """Requests per second with so many tokens that decode ends with all seats taken."""
        step_s = self.step_s + self.sequence_s * self.num_seats
        return self.num_decode * self.num_seats / (step_s * num_tokens)


@dataclass(slots=True)
class Job:
    """One request, and what became of it.

    Attributes:
        tenant: its tenant's name.
        weight: its tenant's weight.
        num_prompt_tokens: tokens of its prompt.
        num_tokens: tokens of its answer.
        timeout_s: its deadline, from its arrival.
        slo: its objectives.
        is_return: whether it was refused before.
        arrived_at: when it came.
        first_token_at: when its first token came; None until then.
        ended_at: when it was answered or refused.
        outcome: "done", or the reason why not.
        retry_after_s: when the client may come back, if it was refused.
    """

    tenant: str
    weight: int
    num_prompt_tokens: int
    num_tokens: int
    timeout_s: float
    slo: Slo = NO_SLO
    is_return: bool = False
    arrived_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float = 0.0
    outcome: str = ""
    retry_after_s: float | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that its prompt and its answer fill."""
        return -(-(self.num_prompt_tokens + self.num_tokens) // _BLOCK_SIZE)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A job on a decode replica."""

    job: Job
    num_tokens: int = 0
    began: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    ended: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class _Decode:
    """A decode replica."""

    def __init__(self, name: str, machines: Machines, waiting: WaitingRequests) -> None:
        self._machines = machines
        self._waiting = waiting
        self._queue: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._work = asyncio.Event()
        self.load = ReplicaLoad(
            worker_pb2.GetInfoResponse(
                worker_id=name,
                num_blocks=machines.num_blocks,
                block_size=_BLOCK_SIZE,
                pool_block_size=_BLOCK_SIZE,
                max_num_seqs=machines.num_seats,
                max_num_requests=machines.max_num_requests,
            ),
            clock=asyncio.get_running_loop().time,
        )
        self.report()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def start(self, job: Job) -> _Sequence:
        """Queues a job."""
        sequence = _Sequence(job)
        self._queue.append(sequence)
        self._work.set()
        return sequence

    def drop(self, sequence: _Sequence) -> None:
        """Ends a job, if it has not ended."""
        if sequence in self._queue:
            self._queue.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)

    def report(self) -> None:
        """Reports the load, as workers do."""
        self.load.take(
            worker_pb2.WorkerLoad(
                num_running=len(self._running),
                num_waiting=len(self._queue),
                num_free_blocks=self._num_free_blocks(),
                num_blocks=self._machines.num_blocks,
            )
        )
        if self.load.may_start(0):
            self._waiting.offer()

    async def run(self) -> None:
        """Computes steps until cancelled."""
        while True:
            self._admit()
            if not self._running:
                self._work.clear()
                await self._work.wait()
                continue
            machines = self._machines
            await asyncio.sleep(machines.step_s + machines.sequence_s * len(self._running))
            for sequence in list(self._running):
                self._step(sequence)

    async def run_reports(self) -> None:
        """Reports the load until cancelled."""
        while True:
            await asyncio.sleep(_REPORT_INTERVAL_S)
            self.report()

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._machines.num_seats:
            if self._queue[0].job.num_blocks > self._num_free_blocks():
                return
            self._running.append(self._queue.popleft())

    def _step(self, sequence: _Sequence) -> None:
        sequence.num_tokens += 1
        if not sequence.began.done():
            sequence.began.set_result(None)
        if sequence.num_tokens >= sequence.job.num_tokens:
            self._running.remove(sequence)
            sequence.ended.set_result(None)

    def _num_free_blocks(self) -> int:
        return self._machines.num_blocks - sum(each.job.num_blocks for each in self._running)


class _Prefill:
    """A prefill replica, which computes one prompt after the other."""

    def __init__(self, machines: Machines, waiting: WaitingRequests) -> None:
        self._tokens_per_s = machines.prefill_tokens_per_s
        self._waiting = waiting
        self._computes = asyncio.Lock()
        info = worker_pb2.GetInfoResponse(block_size=_BLOCK_SIZE)
        self.load = ReplicaLoad(info, clock=asyncio.get_running_loop().time)
        self.busy_s = 0.0

    async def compute(self, num_tokens: int) -> None:
        """Computes a prompt."""
        try:
            with self.load.reserve(num_tokens, 0):
                async with self._computes:
                    self.busy_s += num_tokens / self._tokens_per_s
                    await asyncio.sleep(num_tokens / self._tokens_per_s)
        finally:
            self._waiting.offer()


class SimulatedCluster:
    """A router and its replicas. Made and used within a running event loop.

    Args:
        machines: the replicas.
        limits_sending: whether requests wait in the router until one would start soon, as they do
            in the router proper. Otherwise they wait in the queues of the replicas.
        is_fair: whether the router distinguishes tenants.

    Attributes:
        jobs: those that have ended.
        max_waiting: the most requests that waited in the router at once.
        max_held: the most requests that ran or waited at once.
    """

    def __init__(
        self, machines: Machines, *, limits_sending: bool = True, is_fair: bool = True
    ) -> None:
        self._clock = asyncio.get_running_loop().time
        self._limits_sending = limits_sending
        self._is_fair = is_fair
        self._waiting = WaitingRequests(self._clock)
        self._decodes = [
            _Decode(f"d{i}", machines, self._waiting) for i in range(machines.num_decode)
        ]
        self._prefills = [_Prefill(machines, self._waiting) for _ in range(machines.num_prefill)]
        num_seats = machines.num_decode * machines.num_seats
        self.admission = Admission()
        self.admission.read_num_seats = lambda: num_seats
        self.backlog = Backlog(lambda: num_seats, clock=self._clock)
        self.jobs: list[Job] = []
        self.max_waiting = self.max_held = 0
        self._num_jobs = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to compute."""
        for decode in self._decodes:
            self._spawn(decode.run())
            self._spawn(decode.run_reports())

    async def close(self) -> None:
        """Ends all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, job: Job) -> None:
        """Runs a job to its end, or refuses it."""
        job.arrived_at = self._clock()
        try:
            self._check(job)
            async with asyncio.timeout(job.timeout_s):
                await self._serve(job)
            job.outcome = "done"
        except (ResourceExhaustedError, DeadlineExceededError) as error:
            job.outcome, job.retry_after_s = error.reason, error.retry_after_s
        except TimeoutError:
            job.outcome = "late"
        job.ended_at = self._clock()
        self.jobs.append(job)

    def _check(self, job: Job) -> None:
        self.backlog.check(0, job.timeout_s, job.num_tokens, share=self._share(job), slo=job.slo)

    def _share(self, job: Job, num_tokens: float = 0.0) -> Share:
        tenant, weight = (job.tenant, job.weight) if self._is_fair else ("", 1)
        return Share(tenant, weight, num_tokens)

    async def _serve(self, job: Job) -> None:
        self._num_jobs += 1
        with (
            self.admission.admit(str(self._num_jobs), job.tenant, job.weight),
            self.backlog.place(0, self._share(job)) as place,
        ):
            self.max_held = max(self.max_held, self.admission.num_running)
            num_tokens = job.num_prompt_tokens + self.backlog.expected_tokens(job.num_tokens)
            share = self._share(job, num_tokens)
            began_at = self._clock()
            decode = await self._find(job, share)
            has_waited, num_used = self._clock() > began_at, 0
            try:
                if has_waited:
                    self.backlog.check_start(self._left_s(job), job.num_tokens)
                num_used = job.num_prompt_tokens + job.num_tokens
                await self._compute(job, decode, place)
            finally:
                if has_waited:
                    self._waiting.shares.settle(share, num_used)

    async def _find(self, job: Job, share: Share) -> _Decode:
        turn = Turn(True, 0, job.arrived_at + job.timeout_s, share)
        self.max_waiting = max(self.max_waiting, len(self._waiting) + 1)
        decode = await self._waiting.wait(
            lambda: self._pick(job), turn, 30.0, lambda: "decode", lambda: True
        )
        assert decode is not None, "a request may wait up to its deadline"
        return decode

    def _pick(self, job: Job) -> _Decode | None:
        num_blocks = -(-job.num_prompt_tokens // _BLOCK_SIZE)
        decodes = self._decodes
        if self._limits_sending:
            if not any(prefill.load.may_queue_prompt for prefill in self._prefills):
                return None
            decodes = [decode for decode in decodes if decode.load.may_start(num_blocks)]
        free = [decode for decode in decodes if decode.load.has_room]
        return min(free, key=lambda each: each.load.candidate(1.0).num_requests, default=None)

    async def _compute(self, job: Job, decode: _Decode, place: Place) -> None:
        num_blocks = -(-job.num_prompt_tokens // _BLOCK_SIZE)
        prefill = min(self._prefills, key=lambda each: each.load.candidate(1.0).num_queued_tokens)
        with ExitStack() as ends:
            reserved = ends.enter_context(ExitStack())
            reserved.enter_context(decode.load.reserve(0, num_blocks, is_sent=False))
            ends.callback(self._waiting.offer)
            await prefill.compute(job.num_prompt_tokens)
            job.first_token_at = self._clock()
            self.backlog.note_first_token(place)
            reserved.close()  # and at once again, as it is sent now
            ends.enter_context(decode.load.reserve(0, num_blocks))
            sequence = decode.start(job)
            try:
                await sequence.began
                self.backlog.begin(place)
                await sequence.ended
            finally:
                place.num_tokens = sequence.num_tokens
                decode.drop(sequence)

    def _left_s(self, job: Job) -> float:
        return job.arrived_at + job.timeout_s - self._clock()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def num_accounts(self) -> int:
        """Tenants of which the queue remembers anything."""
        return len(self._waiting.shares)

    def prefill_busy_s(self) -> Sequence[float]:
        """Seconds for which each prefill replica has computed."""
        return [prefill.busy_s for prefill in self._prefills]
