"""Tiers of simulated replicas in virtual time, behind the router's own load and policies."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from baton.v1 import worker_pb2
from router.fleet.replica_load import ReplicaLoad
from router.routing.cache_form import CacheForm
from router.routing.cache_index import CacheIndex
from router.routing.candidate import Candidate, Prompt
from router.routing.policy import Choice, RoutingPolicy

BLOCK_SIZE = 16
REPORT_S = 0.05


class VirtualTime:
    """A clock, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = until


@dataclass
class Job:
    """A request.

    Attributes:
        keys: keys of the prompt's blocks.
        num_tokens: tokens that it generates, on decode.
        replica: where it was sent.
        started_after_s: when its prompt was computed, since it came.
    """

    keys: Sequence[bytes]
    num_tokens: int = 100
    replica: int = -1
    started_after_s: float | None = None


class SimulatedReplica:
    """Computes prompts one after the other, and decodes sequences beside each other.

    Args:
        time: the virtual time.
        name: its id.
        token_s: seconds per prompt token.
        step_s: seconds in which each sequence decodes once while all seats are taken.
        num_seats: the seats.
    """

    def __init__(
        self, time: VirtualTime, name: str, token_s: float, step_s: float, num_seats: int
    ) -> None:
        self._time, self._token_s, self._step_s, self._num_seats = time, token_s, step_s, num_seats
        self.info = worker_pb2.GetInfoResponse(
            worker_id=name,
            num_blocks=1 << 20,
            block_size=BLOCK_SIZE,
            pool_block_size=BLOCK_SIZE,
            max_num_seqs=num_seats,
        )
        self.load = ReplicaLoad(self.info, clock=lambda: time.now)
        self.cached: set[bytes] = set()
        self.num_served = self.num_hit_tokens = 0
        self.busy_s = 0.0
        self._free_at = 0.0
        self._prompts = 0
        self._running: dict[int, float] = {}  # tokens left, by number
        self._ends: dict[int, Callable[[], None]] = {}
        self._decoded_at = 0.0
        self._round = 0
        self._report()

    def _report(self) -> None:
        backlog_s = max(self._free_at - self._time.now, 0.0)
        self.load.take(
            worker_pb2.WorkerLoad(
                num_running=len(self._running),
                num_waiting=self._prompts,
                num_queued_tokens=int(backlog_s / self._token_s),
                queued_prompt_s=backlog_s,
                num_free_blocks=1 << 20,
                num_blocks=1 << 20,
                num_cached_blocks=len(self.cached),
                prompt_token_s=self._token_s,
                decode_step_s=self._step_s,
            )
        )
        self._time.after(REPORT_S, self._report)

    def prefill(self, job: Job, on_end: Callable[[], None]) -> None:
        num_hits = next(
            (i for i, key in enumerate(job.keys) if key not in self.cached), len(job.keys)
        )
        self.cached.update(job.keys)
        self.num_served += 1
        self.num_hit_tokens += num_hits * BLOCK_SIZE
        compute_s = max((len(job.keys) - num_hits) * BLOCK_SIZE, 1) * self._token_s
        self.busy_s += compute_s
        self._free_at = max(self._free_at, self._time.now) + compute_s
        self._prompts += 1
        arrived_at, wait_s = self._time.now, self._free_at - self._time.now

        def end() -> None:
            self._prompts -= 1
            job.started_after_s = self._time.now - arrived_at
            on_end()

        self._time.after(wait_s, end)

    def decode(self, job: Job, on_end: Callable[[], None]) -> None:
        """Each sequence gets its share of the tokens that a full replica generates per second."""
        self.num_served += 1
        self._advance()
        self._running[self.num_served] = job.num_tokens
        self._ends[self.num_served] = on_end
        self._plan()

    def _advance(self) -> None:
        if self._running:
            made = (self._time.now - self._decoded_at) / self._token_time_s
            self._running = {job: left - made for job, left in self._running.items()}
        self._decoded_at = self._time.now

    @property
    def _token_time_s(self) -> float:
        return self._step_s * max(len(self._running), 1) / self._num_seats

    def _plan(self) -> None:
        self._round += 1
        if self._running:
            first_s = max(min(self._running.values()), 0.0) * self._token_time_s
            self._time.after(first_s, lambda expected=self._round: self._end_some(expected))

    def _end_some(self, expected: int) -> None:
        if expected != self._round:
            return  # others came meanwhile
        self._advance()
        for job in [job for job, left in self._running.items() if left <= 1e-6]:
            del self._running[job]
            self._ends.pop(job)()
        self._plan()


class SimulatedTier:
    """Sends jobs to replicas as the router does.

    Args:
        policy: chooses.
        time: the virtual time.
        speeds: per replica, the factor by which it is faster than the first.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        time: VirtualTime,
        speeds: Sequence[float],
        *,
        token_s: float = 1e-4,
        step_s: float = 0.05,
        num_seats: int = 64,
    ) -> None:
        self._policy = policy
        self._index = CacheIndex(clock=lambda: time.now)
        self.replicas = [
            SimulatedReplica(time, f"r{i}", token_s / speed, step_s / speed, num_seats)
            for i, speed in enumerate(speeds)
        ]
        for replica in self.replicas:
            self._index.join(replica.info.worker_id, CacheForm())
        self.choices: list[Choice] = []

    def prefill(self, job: Job) -> None:
        self._send(job, self._policy.pick_prefill, SimulatedReplica.prefill)

    def decode(self, job: Job) -> None:
        self._send(job, self._policy.pick_decode, SimulatedReplica.decode)

    def _send(
        self,
        job: Job,
        pick: Callable[[Sequence[Candidate], Prompt], Choice | None],
        run: Callable[[SimulatedReplica, Job, Callable[[], None]], None],
    ) -> None:
        num_tokens = max(len(job.keys), 1) * BLOCK_SIZE + 1
        prompt = Prompt(
            num_tokens=num_tokens,
            block_size=BLOCK_SIZE,
            match=self._index.match(job.keys, num_tokens),
            key=job.keys[0] if job.keys else b"",
            num_output_tokens=job.num_tokens,
        )
        choice = pick([replica.load.candidate(1.0) for replica in self.replicas], prompt)
        assert choice is not None
        self.choices.append(choice)
        job.replica = int(choice.replica_id[1:])
        replica = self.replicas[job.replica]
        self._index.expect(choice.replica_id, job.keys)
        reserved = ExitStack()
        num_tokens = choice.cost.uncached_tokens if run is SimulatedReplica.prefill else 0
        reserved.enter_context(replica.load.reserve(num_tokens, len(job.keys) + 1))
        run(replica, job, reserved.close)
