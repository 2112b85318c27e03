"""`ClusterServicer`: ClusterService, for operators."""

import time
from typing import Any

from typing_extensions import override

from baton.common.errors import InvalidArgumentError, NotFoundError
from baton.common.short_texts import short_repr
from baton.v1 import cluster_pb2, cluster_pb2_grpc
from router.cluster_status import ClusterStatus
from router.generation_wire import usage_to_proto
from router.models import Models
from router.observe.request_log import RequestLog
from router.observe.request_record import RequestRecord
from router.observe.request_timeline import stages_of

__all__ = ["ClusterServicer"]

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1000


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
    )
    if record.first_token_at is not None:
        trace.first_token_ms = record.ms_since_arrival(record.first_token_at)
    return trace
