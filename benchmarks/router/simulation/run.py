"""`simulate`: one run of a trace through simulated replicas and routers."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, quantiles

from benchmarks.router.simulation.cluster import SimulatedCluster
from benchmarks.router.simulation.replica import Machine
from benchmarks.router.simulation.requests import SimulatedRequest, make_requests
from benchmarks.router.simulation.router import OracleRouter, SimulatedRouter
from benchmarks.router.simulation.virtual_time import run_in_virtual_time
from benchmarks.workloads.trace import TraceLine
from router.routing.policies import make_policy
from router.routing.policy import PolicySettings

__all__ = ["ORACLE", "Outcome", "Setting", "send_requests", "simulate"]

ORACLE = "oracle"
"""The policy `prefix` in a router that sees all pools."""
_FIRST_ARRIVAL_S = 1.0
"""Before that, routers hear of all replicas."""
_SAMPLE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs of a measurement have in common.

    Attributes:
        lines: the trace.
        num_replicas: replicas of each tier.
        load: prompt tokens that arrive, as a share of what the prefill tier computes without hits;
            None for the trace at its own times.
        machine: what each replica runs on.
    """

    lines: Sequence[TraceLine]
    num_replicas: int = 64
    load: float | None = 0.9
    machine: Machine = field(default_factory=Machine)

    @property
    def tier(self) -> Sequence[Machine]:
        """The machines of each tier."""
        return [self.machine] * self.num_replicas

    def requests(self, seed: int) -> Sequence[SimulatedRequest]:
        """The requests of the trace, at the rate that makes the load."""
        max_tokens = self.machine.num_blocks * self.machine.block_size * 9 // 10
        make = partial(make_requests, self.lines, max_total_tokens=max_tokens, seed=seed)
        requests = make()
        if self.load is None:
            return requests
        work_s = sum(
            self.machine.prompt_s + request.num_tokens * self.machine.prompt_token_s
            for request in requests
        )
        trace_s = requests[-1].arrival_s - requests[0].arrival_s
        duration_s = work_s / self.num_replicas / self.load
        num_folds = max(round(trace_s / duration_s), 1)
        return make(num_folds=num_folds, time_scale=duration_s * num_folds / trace_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of one run, or the means of several.

    Attributes:
        hit_rate: prompt tokens found in the cache of the replica that computed the prompt.
        possible_hit_rate: those that one cache without limits would hold.
        follow_up_hits: the share of it that follow-ups found.
        first_token_p50_s: median time to the first token.
        first_token_p90_s: its 90th percentile.
        most_to_mean_load: busy time of the busiest prefill replica over the mean.
        believed_to_held: blocks that the routers' indexes have, over those in the pools.
        local_share: requests whose prompt their decode replica computed.
    """

    hit_rate: float
    possible_hit_rate: float
    follow_up_hits: float
    first_token_p50_s: float
    first_token_p90_s: float
    most_to_mean_load: float
    believed_to_held: float
    local_share: float


def simulate(setting: Setting, policy: str, num_routers: int, seed: int) -> Outcome:
    """Runs a trace once, from empty caches.

    Args:
        setting: the trace and the cluster.
        policy: name of a routing policy, or `ORACLE`.
        num_routers: routers, of which a load balancer draws one for each request.
        seed: spreads arrivals, and draws routers.
    """
    return run_in_virtual_time(_simulate(setting, policy, num_routers, seed))


async def _simulate(setting: Setting, policy: str, num_routers: int, seed: int) -> Outcome:
    cluster = SimulatedCluster(setting.tier, setting.tier)
    router_class = OracleRouter if policy == ORACLE else SimulatedRouter
    name = "prefix" if policy == ORACLE else policy
    routers = [
        router_class(make_policy(name, PolicySettings()), cluster.prefill, cluster.decode)
        for _ in range(num_routers)
    ]
    cluster.start(routers)
    requests = setting.requests(seed)
    samples: list[float] = []
    sampling = asyncio.create_task(_sample(cluster, samples))
    await send_requests(requests, routers, seed)
    sampling.cancel()
    return _outcome(requests, cluster, samples)


async def send_requests(
    requests: Sequence[SimulatedRequest], routers: Sequence[SimulatedRouter], seed: int
) -> None:
    """Sends requests at their times, and waits until all are served.

    Args:
        requests: the requests, whose arrival is made later by the time in which routers hear of
            all replicas.
        routers: the routers; a load balancer draws one for each request.
        seed: draws them.
    """
    source = random.Random(seed)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            request.arrival_s += _FIRST_ARRIVAL_S
            await asyncio.sleep(request.arrival_s - loop.time())
            tasks.create_task(source.choice(routers).serve(request))


async def _sample(cluster: SimulatedCluster, samples: list[float]) -> None:
    """Compares what the routers believe with what the pools hold, until cancelled."""
    while True:
        await asyncio.sleep(_SAMPLE_INTERVAL_S)
        if (ratio := cluster.believed_to_held()) is not None:
            samples.append(ratio)


def _outcome(
    requests: Sequence[SimulatedRequest], cluster: SimulatedCluster, samples: Sequence[float]
) -> Outcome:
    follow_ups = [request for request in requests if request.is_follow_up]
    num_tokens = sum(request.num_tokens for request in requests)
    tenths = quantiles((request.first_token_s for request in requests), n=10)
    busy = [replica.busy_s for replica in cluster.prefill]
    num_remote = sum(replica.num_requests for replica in cluster.prefill)
    return Outcome(
        hit_rate=sum(request.cached_tokens for request in requests) / num_tokens,
        possible_hit_rate=sum(request.num_shared_tokens for request in requests) / num_tokens,
        follow_up_hits=sum(request.cached_tokens for request in follow_ups)
        / max(sum(request.num_shared_tokens for request in follow_ups), 1),
        first_token_p50_s=tenths[4],
        first_token_p90_s=tenths[8],
        most_to_mean_load=max(busy) / fmean(busy) if any(busy) else 1.0,
        believed_to_held=fmean(samples) if samples else 1.0,
        local_share=1 - num_remote / len(requests),
    )
