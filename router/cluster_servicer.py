"""`ClusterServicer`: ClusterService, for operators. `ClusterStatus`: the state that it returns."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
from typing_extensions import override

from baton.common.errors import InvalidArgumentError, NotFoundError
from baton.common.observe.metrics import Series
from baton.common.short_texts import short_repr
from baton.common.version import __version__
from baton.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2
from router.fleet.replica import Replica
from router.fleet.tier import Tier
from router.generation_wire import usage_to_proto
from router.models import Model, Models
from router.observe.activity import Activity, RecentTimes
from router.observe.metrics import RouterMetrics
from router.observe.request_log import RequestLog
from router.observe.request_record import RequestRecord
from router.observe.request_timeline import stages_of
from router.routing.policy import Choice

__all__ = ["ClusterServicer", "ClusterStatus"]

_LOAD_TIMEOUT_S = 1.0
_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1000


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
        backlog_s=replica.backlog_s,
        hit_rate=replica.hit_rate,
    )


def _state_of(replica: Replica) -> "cluster_pb2.ReplicaState.ValueType":
    if not replica.takes_requests:
        return cluster_pb2.REPLICA_STATE_DRAINING
    if replica.is_ejected:
        return cluster_pb2.REPLICA_STATE_EJECTED
    return cluster_pb2.REPLICA_STATE_READY


def _times_to_proto(times: RecentTimes) -> cluster_pb2.RecentTimes:
    return cluster_pb2.RecentTimes(count=times.count, p50_ms=times.p50_ms, p99_ms=times.p99_ms)


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """The service that operators call; `protos/baton/v1/cluster.proto` documents the methods.

    Args:
        log: the records of the last requests.
        status: the state of the cluster.
        models: their replicas.
    """

    def __init__(self, log: RequestLog, status: ClusterStatus, models: Models) -> None:
        self._log = log
        self._status = status
        self._models = models

    @override
    async def GetCluster(
        self, request: cluster_pb2.GetClusterRequest, context: Any
    ) -> cluster_pb2.GetClusterResponse:
        return await self._status.describe()

    @override
    async def ChangeReplicaRole(
        self, request: cluster_pb2.ChangeReplicaRoleRequest, context: Any
    ) -> cluster_pb2.ChangeReplicaRoleResponse:
        for model in self._models:
            if (replica := model.fleet.find(request.replica)) is not None:
                await model.fleet.change_role(replica, request.role)
                return cluster_pb2.ChangeReplicaRoleResponse()
        raise NotFoundError(f"no replica {short_repr(request.replica)} is connected")

    @override
    async def GetTrace(
        self, request: cluster_pb2.GetTraceRequest, context: Any
    ) -> cluster_pb2.GetTraceResponse:
        if request.request_id:
            record = self._log.find(request.request_id)
            if record is None:
                raise NotFoundError(
                    f"no record of request {short_repr(request.request_id)}: it runs still, never "
                    "came, or was dropped for later ones"
                )
            return cluster_pb2.GetTraceResponse(traces=[_trace_of(record)])
        limit = request.limit if request.HasField("limit") else _DEFAULT_LIMIT
        if not 1 <= limit <= _MAX_LIMIT:
            raise InvalidArgumentError.for_field("limit", limit, f"in [1, {_MAX_LIMIT}]")
        return cluster_pb2.GetTraceResponse(traces=map(_trace_of, self._log.latest(limit)))


def _trace_of(record: RequestRecord) -> cluster_pb2.RequestTrace:
    trace = cluster_pb2.RequestTrace(
        request_id=record.request_id,
        model=record.model,
        operation=record.operation,
        tenant=record.tenant,
        outcome=record.outcome,
        usage=usage_to_proto(record.usage),
        arrived_s=time.time() - record.ms_since_arrival() / 1000,
        total_ms=record.ms_since_arrival(record.ended_at),
        send_wait_ms=record.send_wait_s * 1000,
        trace_id=record.trace_id,
        stages=[
            cluster_pb2.TraceStage(
                name=stage.name, where=stage.where, start_ms=stage.start_ms, end_ms=stage.end_ms
            )
            for stage in stages_of(record)
        ],
        choices=[
            _choice_to_proto(attempt.choice)
            for attempt in record.attempts
            if attempt.choice is not None
        ],
    )
    if record.first_token_at is not None:
        trace.first_token_ms = record.ms_since_arrival(record.first_token_at)
    if record.places is not None:
        trace.local_prefill_s, trace.remote_prefill_s = record.places
    return trace


def _choice_to_proto(choice: Choice) -> cluster_pb2.ReplicaChoice:
    return cluster_pb2.ReplicaChoice(
        tier=choice.tier,
        policy=choice.policy,
        reason=choice.reason,
        num_candidates=choice.num_candidates,
        costs=[
            cluster_pb2.ReplicaCost(
                replica=cost.address,
                seconds=cost.seconds,
                uncached_tokens=cost.uncached_tokens,
                compute_s=cost.compute_s,
                load_s=cost.load_s,
                queue_s=cost.queue_s,
                decode_s=cost.decode_s,
                num_requests=cost.num_requests,
                weight=cost.weight,
            )
            for cost in choice.costs
        ],
    )
