"""Checks of running workers: what they themselves see of their KV connector's backends."""

from collections.abc import Iterable, Iterator

import grpc

from baton.common.errors import BatonError
from baton.doctor import Finding, Level
from baton.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.errors import from_rpc_error

__all__ = ["check_running"]

CallMetadata = tuple[tuple[str, str | bytes], ...]

_TIMEOUT_S = 10.0
_TOPIC = "running workers"


def check_running(address: str, channel: grpc.Channel, metadata: CallMetadata) -> Iterator[Finding]:
    """Asks a worker, or a router for all of its workers, for the state of their KV connectors.

    Args:
        address: of the worker or the router, as the caller named it.
        channel: a channel to it.
        metadata: the cluster's credential.
    """
    try:
        yield from _check_router(channel, metadata)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            yield _unanswered(address, from_rpc_error(error))
            return
        try:
            yield from _check_worker(address, channel, metadata)
        except grpc.RpcError as worker_error:
            yield _unanswered(address, from_rpc_error(worker_error))


def _check_router(channel: grpc.Channel, metadata: CallMetadata) -> Iterator[Finding]:
    cluster = cluster_pb2_grpc.ClusterServiceStub(channel).GetCluster(
        cluster_pb2.GetClusterRequest(), timeout=_TIMEOUT_S, metadata=metadata
    )
    for warning in cluster.warnings:
        yield Finding(_TOPIC, Level.PROBLEM, warning)
    if not cluster.replicas:
        yield Finding(_TOPIC, Level.PROBLEM, "the router has found none")
    for replica in cluster.replicas:
        if replica.state == cluster_pb2.REPLICA_STATE_LOST:
            text = f"{replica.address}: not connected: {replica.problem}"
            yield Finding(_TOPIC, Level.PROBLEM, text, {"address": replica.address})
        elif not replica.HasField("counters"):
            text = f"{replica.address}: does not answer"
            yield Finding(_TOPIC, Level.PROBLEM, text, {"address": replica.address})
        else:
            yield from _backends(replica.address, replica.kv_backends)


def _check_worker(address: str, channel: grpc.Channel, metadata: CallMetadata) -> Iterator[Finding]:
    answer = worker_pb2_grpc.WorkerServiceStub(channel).GetLoad(
        worker_pb2.GetLoadRequest(), timeout=_TIMEOUT_S, metadata=metadata
    )
    yield from _backends(address, answer.kv_backends)


def _backends(address: str, backends: Iterable[worker_pb2.KvBackendStatus]) -> Iterator[Finding]:
    """Reports each backend of one worker."""
    backends = list(backends)
    if not backends:
        yield Finding(_TOPIC, Level.NOTE, f"{address}: hands no KV over", {"address": address})
    for backend in backends:
        facts = {
            "address": address,
            "backend": backend.name,
            "identity": backend.identity,
            "can_load": backend.can_load,
            "can_save": backend.can_save,
        }
        works = backend.can_load and backend.can_save and not backend.problem
        text = f"{address}: {backend.name} {'works' if works else backend.problem}"
        yield Finding(_TOPIC, Level.OK if works else Level.PROBLEM, text, facts)


def _unanswered(address: str, error: BatonError) -> Finding:
    text = f"{address}: {error.message}"
    return Finding(_TOPIC, Level.PROBLEM, text, {"address": address})
