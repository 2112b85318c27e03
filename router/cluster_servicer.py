"""`ClusterServicer`: ClusterService, for operators. `ClusterStatus`: the state that it returns."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from typing_extensions import override

from baton.common.errors import BatonError, InvalidArgumentError, NotFoundError
from baton.common.observe.metrics import Series
from baton.common.short_texts import short_repr
from baton.common.version import __version__
from baton.v1 import cluster_pb2, cluster_pb2_grpc, router_process_pb2, worker_pb2
from router.fleet.replica import Replica
from router.fleet.tier import Tier
from router.generation_wire import usage_to_proto
from router.models import Model, Models
from router.observe.activity import Activity
from router.observe.metrics import RouterMetrics
from router.observe.request_log import RequestLog
from router.observe.request_record import RequestRecord
from router.observe.request_timeline import stages_of
from router.processes.merged_states import merge_states, merge_traces
from router.processes.other_processes import OtherProcesses
from router.routing.policy import Choice

__all__ = ["ClusterServicer", "ClusterStatus"]

_LOAD_TIMEOUT_S = 1.0
_NO_REPORT = "it has not reported its load yet"
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

    async def describe(self, *, asks_replicas: bool) -> router_process_pb2.GetProcessResponse:
        """Returns the state of this process and of the replicas.

        Args:
            asks_replicas: whether the connected replicas are asked for their counts.
        """
        found = await asyncio.gather(*(_replicas_of(m, asks_replicas) for m in self._models))
        cluster = cluster_pb2.GetClusterResponse(
            version=__version__,
            uptime_s=self._activity.uptime_s,
            activity=self._describe_activity(),
            replicas=[replica for replicas in found for replica in replicas],
            warnings=filter(None, (model.fleet.stores.warning for model in self._models)),
        )
        return router_process_pb2.GetProcessResponse(
            cluster=cluster,
            first_token_ms=self._activity.first_token_ms,
            token_ms=self._activity.token_ms,
        )

    def _describe_activity(self) -> cluster_pb2.RouterActivity:
        activity, values = self._activity, self._metrics.snapshot().values
        finished = _sums(values, "baton_router_requests", label=1)
        return cluster_pb2.RouterActivity(
            num_running=int(values["baton_router_running_requests",]),
            finished={name: n for name, n in finished.items() if n and not _is_failure(name)},
            failed=activity.failed,
            refused=_sums(values, "baton_router_refused_calls", label=0),
            waiting={model.name: len(model.fleet.waiting) for model in self._models},
            num_resumes=_sums(values, "baton_router_resumes").total(),
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


async def _replicas_of(model: Model, asks_replicas: bool) -> Sequence[cluster_pb2.ReplicaStatus]:
    tiers: Sequence[Tier[Any]] = model.fleet.prefill, model.fleet.decode
    # By worker id: one that serves in both tiers is connected twice.
    connected = {r.replica_id: r for tier in tiers for r in tier.connected if r.has_role}
    # At the same moment: a replica that connects while others are asked would be missing.
    lost = [
        cluster_pb2.ReplicaStatus(
            model=model.name,
            role=tier.role,
            address=address,
            state=cluster_pb2.REPLICA_STATE_LOST,
            problem=problem,
        )
        for tier in tiers
        for address, problem in tier.problems.items()
    ]
    found = await asyncio.gather(
        *(_connected_replica(model.name, replica, asks_replicas) for replica in connected.values())
    )
    addresses = {replica.address for replica in found}
    found += [replica for replica in lost if replica.address not in addresses]
    return sorted(found, key=lambda replica: (replica.role, replica.address))


async def _connected_replica(
    model: str, replica: Replica, asks_replica: bool
) -> cluster_pb2.ReplicaStatus:
    status = cluster_pb2.ReplicaStatus(
        model=model,
        role=replica.role,
        address=replica.address,
        worker_id=replica.replica_id,
        version=replica.info.version,
        state=_state_of(replica),
        backlog_s=replica.backlog_s,
        hit_rate=replica.hit_rate,
    )
    if not replica.has_reported:
        status.problem = _NO_REPORT
    elif asks_replica:
        answer = worker_pb2.GetLoadResponse(load=replica.load)  # the last report stands
        with suppress(BatonError):
            answer = await replica.worker.get_load(_LOAD_TIMEOUT_S)
        status.load.CopyFrom(answer.load)
        if answer.HasField("counters"):
            status.counters.CopyFrom(answer.counters)
        status.kv_backends.extend(answer.kv_backends)
    return status


def _state_of(replica: Replica) -> "cluster_pb2.ReplicaState.ValueType":
    if not replica.has_reported:
        return cluster_pb2.REPLICA_STATE_LOST
    if not replica.takes_requests:
        return cluster_pb2.REPLICA_STATE_DRAINING
    if replica.is_ejected:
        return cluster_pb2.REPLICA_STATE_EJECTED
    return cluster_pb2.REPLICA_STATE_READY


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """The service that operators call; `protos/baton/v1/cluster.proto` documents the methods.

    Args:
        log: the records of the last requests.
        status: the state of the cluster.
        models: their replicas.
        others: the other processes of the router; None if there is one process.
    """

    def __init__(
        self,
        log: RequestLog,
        status: ClusterStatus,
        models: Models,
        others: OtherProcesses | None = None,
    ) -> None:
        self._log = log
        self._status = status
        self._models = models
        self._others = others

    @override
    async def GetCluster(
        self, request: cluster_pb2.GetClusterRequest, context: Any
    ) -> cluster_pb2.GetClusterResponse:
        if self._others is None:
            return merge_states([await self._status.describe(asks_replicas=True)])
        here, (others, silent) = await asyncio.gather(
            self._status.describe(asks_replicas=True), self._others.states()
        )
        return merge_states([here, *others], silent)

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
        limit = _limit_of(request)
        answers = [self.traces_here(request)]
        if self._others is not None and not (request.request_id and answers[0].traces):
            answers += await self._others.traces(request)
        traces = merge_traces(answers, limit, slowest=request.slowest)
        if request.request_id and not traces:
            raise NotFoundError(
                f"no record of request {short_repr(request.request_id)}: it runs still, never "
                "came, or was dropped for later ones"
            )
        return cluster_pb2.GetTraceResponse(traces=traces)

    def traces_here(self, request: cluster_pb2.GetTraceRequest) -> cluster_pb2.GetTraceResponse:
        """Returns the records of this process; none if it has none of the id.

        Raises:
            InvalidArgumentError: the limit is out of range.
        """
        if request.request_id:
            record = self._log.find(request.request_id)
            records = [] if record is None else [record]
        else:
            find = self._log.slowest if request.slowest else self._log.latest
            records = list(find(_limit_of(request)))
        return cluster_pb2.GetTraceResponse(traces=map(_trace_of, records))


def _limit_of(request: cluster_pb2.GetTraceRequest) -> int:
    """The most records that the caller wants.

    Raises:
        InvalidArgumentError: it is out of range.
    """
    if request.request_id:
        return 1
    limit = request.limit if request.HasField("limit") else _DEFAULT_LIMIT
    if not 1 <= limit <= _MAX_LIMIT:
        raise InvalidArgumentError.for_field("limit", limit, f"in [1, {_MAX_LIMIT}]")
    return limit


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
