"""`baton bench router --part overload`: tenants, deadlines and bursts on a simulated cluster.

The router's own queue, estimates and limits decide (`simulated_cluster`), in virtual time: the
figures do not depend on the machine, and minutes of load take seconds.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from baton.common.request.slo import NO_SLO, Slo
from benchmarks.report import Table
from benchmarks.router.simulated_cluster import Job, Machines, SimulatedCluster
from benchmarks.router.virtual_time import run_in_virtual_time

__all__ = [
    "Demand",
    "Load",
    "Outcome",
    "OverloadRow",
    "Phase",
    "measure_overload",
    "overload_table",
    "simulate",
]

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
        machines: the replicas.
        timeout_s: the deadline of all requests.
        comes_back: whether clients come back once when they were asked to.
        limits_sending: whether requests wait in the router; False: in the replicas' queues.
        is_fair: whether the router distinguishes tenants.
        slo: objectives of all requests.
        seed: of arrivals and lengths.
    """

    phases: Sequence[Phase]
    demands: Sequence[Demand] = _DEMANDS
    machines: Machines = field(default_factory=Machines)
    timeout_s: float = _TIMEOUT_S
    comes_back: bool = False
    limits_sending: bool = True
    is_fair: bool = True
    slo: Slo = NO_SLO
    seed: int = 0

    @property
    def capacity(self) -> float:
        """Requests per second that the replicas end at most."""
        prefill = self.machines.num_prefill * self.machines.prefill_tokens_per_s
        return min(self.machines.decode_rate(_MEAN_TOKENS), prefill / _MEAN_PROMPT_TOKENS)

    @property
    def seconds(self) -> float:
        """How long all phases last."""
        return sum(phase.seconds for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of all requests.

    Attributes:
        jobs: the requests.
        max_held: the most that the router held at once.
        num_accounts: tenants that its queue remembered at the end.
        prefill_busy_s: how long prefill computed, in all.
    """

    jobs: Sequence[Job]
    max_held: int
    num_accounts: int
    prefill_busy_s: float

    def goodput(self, start: float, end: float) -> float:
        """Tokens per second of the answers that ended by their deadline between two moments. Under
        overload short ones have better chances, so a number of requests would say less.
        """
        done = [job for job in self.jobs if job.outcome == "done" and start <= job.ended_at < end]
        return sum(job.num_tokens for job in done) / (end - start)

    def shares(self, start: float, end: float) -> Mapping[str, float]:
        """The parts of the tokens of answered requests that each tenant had."""
        tokens: Counter[str] = Counter()
        for job in self.jobs:
            if job.outcome == "done" and start <= job.ended_at < end:
                tokens[job.tenant] += job.num_prompt_tokens + job.num_tokens
        return {tenant: number / tokens.total() for tenant, number in tokens.items()}

    def refused(self) -> Sequence[Job]:
        """The requests that were refused."""
        return [job for job in self.jobs if job.outcome not in ("done", "late")]

    def slow_refusals(self, limit_s: float) -> float:
        """The part of the refusals that took longer."""
        refused = self.refused()
        slow = [job for job in refused if job.ended_at - job.arrived_at > limit_s]
        return len(slow) / max(len(refused), 1)

    def admitted_returns(self) -> float:
        """The part of the clients that were let in when they came back."""
        returns = [job for job in self.jobs if job.is_return]
        admitted = [job for job in returns if job.outcome in ("done", "late")]
        return len(admitted) / max(len(returns), 1)

    def wasted_prefill(self, load: Load) -> float:
        """The part of the computed prompts whose request was not answered in time."""
        rate = load.machines.prefill_tokens_per_s
        used = sum(job.num_prompt_tokens for job in self.jobs if job.outcome == "done") / rate
        return 1 - used / max(self.prefill_busy_s, 1e-9)

    def recovery_s(self, burst_end: float, seconds: float) -> float:
        """Seconds after a burst from which on nearly all new requests are answered in time."""
        last = 0.0
        for second in range(int(seconds)):
            start = burst_end + second
            new = [job for job in self.jobs if start <= job.arrived_at < start + 1]
            done = [job for job in new if job.outcome == "done"]
            if len(done) < _RECOVERED_SHARE * len(new):
                last = second + 1.0
        return last


def simulate(load: Load) -> Outcome:
    """Runs a load to its end."""
    return run_in_virtual_time(_simulate(load))


async def _simulate(load: Load) -> Outcome:
    cluster = SimulatedCluster(
        load.machines, limits_sending=load.limits_sending, is_fair=load.is_fair
    )
    cluster.start()
    draw = random.Random(load.seed)
    async with asyncio.TaskGroup() as tasks:
        for phase in load.phases:
            end = asyncio.get_running_loop().time() + phase.seconds
            while asyncio.get_running_loop().time() < end:
                tasks.create_task(_client(cluster, _job(load, draw), comes_back=load.comes_back))
                await asyncio.sleep(draw.expovariate(phase.load * load.capacity))
    await cluster.close()
    return Outcome(
        cluster.jobs, cluster.max_held, cluster.num_accounts, sum(cluster.prefill_busy_s())
    )


def _job(load: Load, draw: random.Random) -> Job:
    (demand,) = draw.choices(load.demands, [demand.share for demand in load.demands])
    return Job(
        tenant=demand.tenant,
        weight=demand.weight,
        num_prompt_tokens=draw.randint(1, 2 * _MEAN_PROMPT_TOKENS - 1),
        num_tokens=draw.randint(1, 2 * _MEAN_TOKENS - 1),
        timeout_s=load.timeout_s,
        slo=load.slo,
    )


async def _client(cluster: SimulatedCluster, job: Job, *, comes_back: bool) -> None:
    await cluster.serve(job)
    if comes_back and job.retry_after_s is not None:
        await asyncio.sleep(job.retry_after_s)
        await cluster.serve(
            replace(job, is_return=True, first_token_at=None, outcome="", retry_after_s=None)
        )


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
    seconds = 4.0 if is_smoke else 20.0
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
