"""`baton bench router --part overload`: tenants, deadlines and bursts on a simulated cluster.

The router's own queue, estimates and limits decide (`QueueingRouter`), in virtual time: the
figures do not depend on the machine, and minutes of load take seconds.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from baton.common.request.slo import NO_SLO, Slo
from benchmarks.report import Table
from benchmarks.router.simulation.cluster import SimulatedCluster
from benchmarks.router.simulation.queueing import QueueingRouter, TenantRequest
from benchmarks.router.simulation.replica import Machine
from benchmarks.router.simulation.virtual_time import run_in_virtual_time
from router.routing.policies import make_policy
from router.routing.policy import PolicySettings

__all__ = [
    "SMALL_MACHINE",
    "Demand",
    "Load",
    "Outcome",
    "OverloadRow",
    "Phase",
    "measure_overload",
    "overload_table",
    "simulate",
]

SMALL_MACHINE = Machine(
    prompt_token_s=1 / 20_000,
    prompt_s=0.0,
    step_s=0.0105,
    sequence_s=0.0005,
    num_seats=16,
    kv_bytes_per_token=0,
    num_blocks=1024,
    block_size=16,
)
"""Small enough for a few hundred requests to be too many."""
_TIMEOUT_S = 4.0
_MEAN_PROMPT_TOKENS = 128
_MEAN_TOKENS = 32
_RECOVERED_SHARE = 0.95
_MAX_REFUSAL_S = 0.05
_LOADS = (0.8, 0.9, 1.0, 1.2)
"""Multiples of the capacity among which the peak of the goodput is."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one tenant asks for.

    Attributes:
        tenant: its name.
        weight: its weight.
        share: its part of all arrivals.
    """

    tenant: str
    weight: int
    share: float


_DEMANDS = (Demand("flood", 1, 0.6), Demand("heavy", 2, 0.3), Demand("light", 1, 0.1))
"""At three times the capacity each asks for more than its share."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A time of steady load.

    Attributes:
        seconds: how long it lasts.
        load: arrivals, as a multiple of the cluster's capacity.
    """

    seconds: float
    load: float


@dataclass(frozen=True, slots=True)
class Load:
    """What is simulated.

    Attributes:
        phases: loads, one after the other.
        demands: what tenants ask for.
        num_prefill: prefill replicas.
        num_decode: decode replicas.
        machine: what each replica runs on.
        timeout_s: the deadline of all requests.
        comes_back: whether clients come back once when they were asked to.
        limits_sending: whether requests wait in the router; False: in the replicas' queues.
        is_fair: whether the router distinguishes tenants.
        slo: objectives of all requests.
        seed: of arrivals and lengths.
    """

    phases: Sequence[Phase]
    demands: Sequence[Demand] = _DEMANDS
    num_prefill: int = 1
    num_decode: int = 2
    machine: Machine = SMALL_MACHINE
    timeout_s: float = _TIMEOUT_S
    comes_back: bool = False
    limits_sending: bool = True
    is_fair: bool = True
    slo: Slo = NO_SLO
    seed: int = 0

    @property
    def capacity(self) -> float:
        """Requests per second that the replicas end at most."""
        machine = self.machine
        prefill = self.num_prefill / (machine.prompt_token_s * _MEAN_PROMPT_TOKENS)
        decode = self.num_decode * machine.num_seats / (machine.full_step_s * _MEAN_TOKENS)
        return min(prefill, decode)

    @property
    def seconds(self) -> float:
        """How long all phases last."""
        return sum(phase.seconds for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of all requests.

    Attributes:
        requests: the requests.
        max_held: the most that the router held at once.
        num_accounts: tenants that its queue remembered at the end.
        prefill_busy_s: how long prefill computed, in all.
    """

    requests: Sequence[TenantRequest]
    max_held: int
    num_accounts: int
    prefill_busy_s: float

    def goodput(self, start: float, end: float) -> float:
        """Tokens per second of the answers that ended by their deadline between two moments. Under
        overload short ones have better chances, so a number of requests would say less.
        """
        done = self._done(start, end)
        return sum(request.num_output_tokens for request in done) / (end - start)

    def shares(self, start: float, end: float) -> Mapping[str, float]:
        """The parts of the tokens of answered requests that each tenant had."""
        tokens: Counter[str] = Counter()
        for request in self._done(start, end):
            tokens[request.tenant] += request.num_tokens + request.num_output_tokens
        return {tenant: number / tokens.total() for tenant, number in tokens.items()}

    def refused(self) -> Sequence[TenantRequest]:
        """The requests that were refused."""
        return [request for request in self.requests if request.outcome not in ("done", "late")]

    def slow_refusals(self, limit_s: float) -> float:
        """The part of the refusals that took longer."""
        refused = self.refused()
        slow = [request for request in refused if request.ended_at - request.arrival_s > limit_s]
        return len(slow) / max(len(refused), 1)

    def admitted_returns(self) -> float:
        """The part of the clients that were let in when they came back."""
        returns = [request for request in self.requests if request.is_return]
        admitted = [request for request in returns if request.outcome in ("done", "late")]
        return len(admitted) / max(len(returns), 1)

    def wasted_prefill(self, load: Load) -> float:
        """The part of the computed prompts whose request was not answered in time."""
        done = [request for request in self.requests if request.outcome == "done"]
        used_s = load.machine.prompt_token_s * sum(request.num_tokens for request in done)
        return 1 - used_s / max(self.prefill_busy_s, 1e-9)

    def recovery_s(self, burst_end: float, seconds: float) -> float:
        """Seconds after a burst from which on nearly all new requests are answered in time."""
        last = 0.0
        for second in range(int(seconds)):
            start = burst_end + second
            new = [request for request in self.requests if start <= request.arrival_s < start + 1]
            done = [request for request in new if request.outcome == "done"]
            if len(done) < _RECOVERED_SHARE * len(new):
                last = second + 1.0
        return last

    def _done(self, start: float, end: float) -> Sequence[TenantRequest]:
        """The requests that were answered between two moments."""
        ended = [request for request in self.requests if start <= request.ended_at < end]
        return [request for request in ended if request.outcome == "done"]


def simulate(load: Load) -> Outcome:
    """Runs a load to its end."""
    return run_in_virtual_time(_simulate(load))


async def _simulate(load: Load) -> Outcome:
    cluster = SimulatedCluster([load.machine] * load.num_prefill, [load.machine] * load.num_decode)
    router = QueueingRouter(
        make_policy("prefix", PolicySettings()),
        cluster.prefill,
        cluster.decode,
        limits_sending=load.limits_sending,
        is_fair=load.is_fair,
    )
    cluster.start([router])
    draw, numbers = random.Random(load.seed), itertools.count()
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as tasks:
        for phase in load.phases:
            end = clock() + phase.seconds
            while clock() < end:
                request = _request(load, draw, next(numbers))
                tasks.create_task(_client(router, request, comes_back=load.comes_back))
                await asyncio.sleep(draw.expovariate(phase.load * load.capacity))
    busy_s = sum(replica.busy_s for replica in cluster.prefill)
    return Outcome(router.ended, router.max_held, router.num_accounts, busy_s)


def _request(load: Load, draw: random.Random, number: int) -> TenantRequest:
    """Draws a request, whose prompt has nothing in common with others."""
    (demand,) = draw.choices(load.demands, [demand.share for demand in load.demands])
    num_tokens = draw.randint(1, 2 * _MEAN_PROMPT_TOKENS - 1)
    return TenantRequest(
        number=number,
        arrival_s=0.0,
        num_tokens=num_tokens,
        num_output_tokens=draw.randint(1, 2 * _MEAN_TOKENS - 1),
        keys=[b"%d/%d" % (number, i) for i in range(num_tokens // load.machine.block_size)],
        tenant=demand.tenant,
        weight=demand.weight,
        timeout_s=load.timeout_s,
        slo=load.slo,
    )


async def _client(router: QueueingRouter, request: TenantRequest, *, comes_back: bool) -> None:
    await router.serve_or_refuse(request)
    if comes_back and request.retry_after_s is not None:
        await asyncio.sleep(request.retry_after_s)
        await router.serve_or_refuse(replace(request, is_return=True))


@dataclass(frozen=True, slots=True)
class OverloadRow:
    """Figures of three times the capacity.

    Attributes:
        queue: where requests wait.
        peak: the goodput at the best of lower loads, in tokens/s.
        goodput: that of this load, as a part of it.
        slow_refusals: the part of the refusals that took longer than 50 ms.
        worst_share: the share of the tokens, over the fair one, of the tenant that is furthest
            from it.
        wasted_prefill: the part of the computed prompts whose request was not answered in time.
        recovery_s: seconds after a burst from which on requests are answered in time.
        admitted_returns: the part of the refused clients that were let in at their return.
        max_held: the most requests that the router held.
    """

    queue: str
    peak: float
    goodput: float
    slow_refusals: float
    worst_share: float
    wasted_prefill: float
    recovery_s: float
    admitted_returns: float
    max_held: int


def measure_overload(*, is_smoke: bool) -> Sequence[OverloadRow]:
    """Simulates overload, with requests that wait in the router and, for comparison, in the
    replicas.

    Args:
        is_smoke: for a short time, whose figures mean nothing.
    """
    seconds = 2.0 if is_smoke else 20.0
    peak = max(
        simulate(Load((Phase(seconds, load),))).goodput(seconds / 2, seconds) for load in _LOADS
    )
    return [
        _row("in the router", seconds, peak, Load((), limits_sending=True)),
        _row("in the replicas", seconds, peak, Load((), limits_sending=False)),
        _row(
            "in the replicas, in one line",
            seconds,
            peak,
            Load((), limits_sending=False, is_fair=False),
        ),
    ]


def overload_table(rows: Sequence[OverloadRow]) -> Table:
    """The table of the rows."""
    columns = (
        *("requests wait", "peak, tokens/s", "goodput / peak", "refusals over 50 ms"),
        *("worst share / fair", "prefill in vain", "recovery, s", "admitted returns", "held"),
    )
    return Table(
        title="Three times the capacity of a simulated cluster",
        columns=columns,
        rows=[list(asdict(row).values()) for row in rows],
        note="Tenants of weight 1, 2 and 1 send 1.8, 0.9 and 0.3 times the capacity, with "
        f"deadlines of {_TIMEOUT_S:g} s. All in virtual time: the machine does not matter.",
    )


def _row(queue: str, seconds: float, peak: float, load: Load) -> OverloadRow:
    steady = simulate(replace(load, phases=(Phase(seconds, 3.0),)))
    burst = (Phase(seconds / 4, 0.8), Phase(seconds / 2, 3.0), Phase(seconds, 0.8))
    wave = (Phase(seconds / 4, 0.5), Phase(seconds / 5, 3.0), Phase(2 * seconds, 0.5))
    returning = simulate(replace(load, phases=wave, comes_back=True))
    shares = steady.shares(seconds / 2, seconds)
    weights = sum(demand.weight for demand in load.demands)
    ratios = [shares.get(each.tenant, 0.0) * weights / each.weight for each in load.demands]
    return OverloadRow(
        queue=queue,
        peak=peak,
        goodput=steady.goodput(seconds / 2, seconds) / peak,
        slow_refusals=steady.slow_refusals(_MAX_REFUSAL_S),
        worst_share=max(ratios, key=lambda ratio: abs(ratio - 1)),
        wasted_prefill=steady.wasted_prefill(load),
        recovery_s=simulate(replace(load, phases=burst)).recovery_s(seconds * 3 / 4, seconds),
        admitted_returns=returning.admitted_returns(),
        max_held=steady.max_held,
    )
