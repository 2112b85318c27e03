"""`simulate`: one run of a trace through simulated replicas and routers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, quantiles

from baton.v1 import worker_pb2
from benchmarks.router.simulation.decode import SimulatedDecode
from benchmarks.router.simulation.prefill import SimulatedPrefill
from benchmarks.router.simulation.replica import SimulatedReplica, Speeds
from benchmarks.router.simulation.requests import SimulatedRequest, make_requests
from benchmarks.router.simulation.router import OracleRouter, SimulatedRouter
from benchmarks.router.simulation.virtual_time import VirtualTime
from benchmarks.workloads.trace import TraceLine
from router.routing.policies import make_policy
from router.routing.policy import PolicySettings

__all__ = ["ORACLE", "Outcome", "Setting", "simulate"]

ORACLE = "oracle"
"""The policy `prefix` in a router that sees all pools."""
_REPORT_DELAY_S = 0.001
_EVENT_DELAY_S = 0.02
"""From a change of a pool to the routers' indexes: the rest of an engine's step, and a hop."""
_SAMPLE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs of a measurement have in common.

    Attributes:
        lines: the trace.
        num_replicas: replicas of each tier.
        load: prompt tokens that arrive, as a share of what the prefill tier computes without hits.
        speeds: of each replica.
    """

    lines: Sequence[TraceLine]
    num_replicas: int = 64
    load: float = 0.9
    speeds: Speeds = field(default_factory=Speeds)

    def requests(self, seed: int) -> Sequence[SimulatedRequest]:
        """The requests of the trace, at the rate that makes the load."""
        max_tokens = self.speeds.num_blocks * 512 * 9 // 10
        make = partial(make_requests, self.lines, max_total_tokens=max_tokens, seed=seed)
        requests = make()
        work_s = sum(
            self.speeds.prompt_s + request.num_tokens * self.speeds.prompt_token_s
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


class _Cluster:
    """Replicas and routers that are connected."""

    def __init__(self, setting: Setting, policy: str, num_routers: int) -> None:
        self.time = VirtualTime()
        numbers = range(setting.num_replicas)
        parts = setting.speeds, self.time, self._send_events, self._send_report
        self.prefill = [SimulatedPrefill(f"prefill-{number:03}", *parts) for number in numbers]
        self.decode = [SimulatedDecode(f"decode-{number:03}", *parts) for number in numbers]
        router_class = OracleRouter if policy == ORACLE else SimulatedRouter
        name = "prefix" if policy == ORACLE else policy
        self.routers = [
            router_class(make_policy(name, PolicySettings()), self.prefill, self.decode, self.time)
            for _ in range(num_routers)
        ]
        self.samples: list[float] = []
        for replica in (*self.prefill, *self.decode):
            replica.start()

    def sample(self) -> None:
        """Compares what the routers believe with what the pools hold."""
        held = {r.worker_id: r.kv.pool.num_cached for r in (*self.prefill, *self.decode)}
        if sum(held.values()):
            for router in self.routers:
                believed = router.believed_blocks()
                self.samples.append(sum(believed.values()) / sum(held.values()))

    def _send_events(self, replica: SimulatedReplica, events: Sequence[worker_pb2.KvEvent]) -> None:
        self.time.call_later(
            _EVENT_DELAY_S, partial(self._deliver_events, replica.worker_id, list(events))
        )

    def _deliver_events(self, worker_id: str, events: Sequence[worker_pb2.KvEvent]) -> None:
        for router in self.routers:
            router.take_events(worker_id, events)

    def _send_report(self, replica: SimulatedReplica, report: worker_pb2.WorkerLoad) -> None:
        self.time.call_later(
            _REPORT_DELAY_S, partial(self._deliver_report, replica.worker_id, report)
        )

    def _deliver_report(self, worker_id: str, report: worker_pb2.WorkerLoad) -> None:
        for router in self.routers:
            router.take_report(worker_id, report)


def simulate(setting: Setting, policy: str, num_routers: int, seed: int) -> Outcome:
    """Runs a trace once, from empty caches.

    Args:
        setting: the trace and the cluster.
        policy: name of a routing policy, or `ORACLE`.
        num_routers: routers, of which a load balancer draws one for each request.
        seed: spreads arrivals, and draws routers.
    """
    requests = setting.requests(seed)
    cluster = _Cluster(setting, policy, num_routers)
    source = random.Random(seed)
    # A second in which routers find all replicas comes before the first request.
    for request in requests:
        request.arrival_s += 1.0
        router = source.choice(cluster.routers)
        cluster.time.call_at(request.arrival_s, partial(router.route, request))
    for second in range(2, int(requests[-1].arrival_s)):
        cluster.time.call_at(second * _SAMPLE_INTERVAL_S, cluster.sample)
    cluster.time.run()
    return _outcome(requests, cluster)


def _outcome(requests: Sequence[SimulatedRequest], cluster: _Cluster) -> Outcome:
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
        believed_to_held=fmean(cluster.samples) if cluster.samples else 1.0,
        local_share=1 - num_remote / len(requests),
    )
