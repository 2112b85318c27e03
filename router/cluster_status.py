"""`ClusterStatus`: the state of a router and of its replicas, as ClusterService returns it."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc

from baton.common.observe.metrics import Series
from baton.common.version import __version__
from baton.v1 import cluster_pb2, worker_pb2
from router.fleet.replica import Replica
from router.fleet.tier import Tier
from router.models import Model, Models
from router.observe.activity import Activity, RecentTimes
from router.observe.metrics import RouterMetrics

__all__ = ["ClusterStatus"]

_LOAD_TIMEOUT_S = 1.0


class ClusterStatus:
    """Describes a router and its replicas.

    Args:
        models: the served models.
        metrics: counts the requests.
        activity: their errors and recent times.
    """

    def __init__(self, models: Models, metrics: RouterMetrics, activity: Activity) -> None:
        self._models = models
        self._metrics = metrics
        self._activity = activity

    async def describe(self) -> cluster_pb2.GetClusterResponse:
        """Asks the connected replicas for their counts, and returns the state of all."""
        found = await asyncio.gather(*map(_replicas_of, self._models))
        return cluster_pb2.GetClusterResponse(
            version=__version__,
            uptime_s=self._activity.uptime_s,
            activity=self._describe_activity(),
            replicas=[replica for replicas in found for replica in replicas],
            warnings=filter(None, (model.fleet.stores.warning for model in self._models)),
        )

    def _describe_activity(self) -> cluster_pb2.RouterActivity:
        activity, values = self._activity, self._metrics.snapshot().values
        finished = _sums(values, "baton_router_requests", label=1)
        return cluster_pb2.RouterActivity(
            num_running=int(values["baton_router_running_requests",]),
            finished={name: n for name, n in finished.items() if not _is_failure(name)},
            failed=activity.failed,
            refused=_sums(values, "baton_router_refused_calls", label=0),
            num_resumes=_sums(values, "baton_router_resumes").total(),
            first_token=_times_to_proto(activity.first_token),
            token=_times_to_proto(activity.token),
            errors=[
                cluster_pb2.RecentError(
                    time_s=error.time_s,
                    code=error.code,
                    message=error.message,
                    request_id=error.request_id,
                )
                for error in activity.errors
            ],
        )


def _sums(values: Mapping[Series, float], metric: str, *, label: int = 0) -> Counter[str]:
    """Sums a counter over all labels but one."""
    sums: Counter[str] = Counter()
    for (name, *labels), value in values.items():
        if name == metric:
            sums[labels[label]] += int(value)
    return sums


def _is_failure(outcome: str) -> bool:
    """Whether an outcome is an error's status name; clients that leave cause no error."""
    return outcome.isupper() and outcome != "CANCELLED"


async def _replicas_of(model: Model) -> Sequence[cluster_pb2.ReplicaStatus]:
    tiers: Sequence[Tier[Any]] = model.fleet.prefill, model.fleet.decode
    # By worker id: one that serves in both tiers is connected twice.
    connected = {r.replica_id: r for tier in tiers for r in tier.connected if r.has_role}
    found = await asyncio.gather(
        *(_connected_replica(model.name, replica) for replica in connected.values())
    )
    addresses = {replica.address for replica in found}
    found += [
        cluster_pb2.ReplicaStatus(
            model=model.name,
            role=tier.role,
            address=address,
            state=cluster_pb2.REPLICA_STATE_LOST,
            problem=problem,
        )
        for tier in tiers
        for address, problem in tier.problems.items()
        if address not in addresses
    ]
    return sorted(found, key=lambda replica: (replica.role, replica.address))


async def _connected_replica(model: str, replica: Replica) -> cluster_pb2.ReplicaStatus:
    answer = worker_pb2.GetLoadResponse(load=replica.load)  # the last report stands
    with suppress(grpc.aio.AioRpcError):
        answer = await replica.get_load(_LOAD_TIMEOUT_S)
    return cluster_pb2.ReplicaStatus(
        model=model,
        role=replica.role,
        address=replica.address,
        worker_id=replica.replica_id,
        version=replica.info.version,
        state=_state_of(replica),
        load=answer.load,
        counters=answer.counters if answer.HasField("counters") else None,
        kv_backends=answer.kv_backends,
    )


def _state_of(replica: Replica) -> "cluster_pb2.ReplicaState.ValueType":
    if not replica.takes_requests:
        return cluster_pb2.REPLICA_STATE_DRAINING
    if replica.is_ejected:
        return cluster_pb2.REPLICA_STATE_EJECTED
    return cluster_pb2.REPLICA_STATE_READY


def _times_to_proto(times: RecentTimes) -> cluster_pb2.RecentTimes:
    return cluster_pb2.RecentTimes(count=times.count, p50_ms=times.p50_ms, p99_ms=times.p99_ms)
