"""The state of a router, and its records of requests, out of those of its processes. Pure."""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from baton.v1 import cluster_pb2, router_process_pb2
from router.observe.activity import MAX_ERRORS, RecentTimes

__all__ = ["merge_states", "merge_traces"]

_States = Sequence[router_process_pb2.GetProcessResponse]
_BY_SEVERITY = (
    cluster_pb2.REPLICA_STATE_READY,
    cluster_pb2.REPLICA_STATE_DRAINING,
    cluster_pb2.REPLICA_STATE_EJECTED,
    cluster_pb2.REPLICA_STATE_LOST,
)


def merge_states(states: _States, silent: Sequence[int] = ()) -> cluster_pb2.GetClusterResponse:
    """Returns the state of a router.

    Args:
        states: of its processes. Loads and counters of the replicas are those of the first one.
        silent: the numbers of the processes that have not answered.
    """
    first, *others = (state.cluster for state in states)
    warnings = dict.fromkeys(text for state in states for text in state.cluster.warnings)
    silence = [f"process {number} of the router has not answered in time" for number in silent]
    return cluster_pb2.GetClusterResponse(
        version=first.version,
        uptime_s=max(state.cluster.uptime_s for state in states),
        activity=_merge_activity(states),
        replicas=_merge_replicas(first.replicas, others),
        warnings=[*warnings, *silence],
        num_processes=len(states),
    )


def merge_traces(
    answers: Iterable[cluster_pb2.GetTraceResponse], limit: int, *, slowest: bool = False
) -> list[cluster_pb2.RequestTrace]:
    """Returns the records of all processes, the latest first.

    Args:
        answers: of the processes.
        limit: the most records.
        slowest: whether the longest come first instead, and stay if there are too many.
    """
    traces = (trace for answer in answers for trace in answer.traces)
    return heapq.nlargest(limit, traces, key=_total_ms if slowest else _ended_ms)


def _merge_activity(states: _States) -> cluster_pb2.RouterActivity:
    activities = [state.cluster.activity for state in states]
    errors = heapq.nlargest(
        MAX_ERRORS,
        (error for activity in activities for error in activity.errors),
        key=lambda error: error.time_s,
    )
    return cluster_pb2.RouterActivity(
        num_running=sum(activity.num_running for activity in activities),
        finished=_sums(activity.finished for activity in activities),
        failed=_sums(activity.failed for activity in activities),
        refused=_sums(activity.refused for activity in activities),
        waiting=_sums(activity.waiting for activity in activities),
        num_resumes=sum(activity.num_resumes for activity in activities),
        first_token=_summary(time_ms for state in states for time_ms in state.first_token_ms),
        token=_summary(time_ms for state in states for time_ms in state.token_ms),
        errors=errors,
    )


def _total_ms(trace: cluster_pb2.RequestTrace) -> float:
    return trace.total_ms


def _ended_ms(trace: cluster_pb2.RequestTrace) -> float:
    return trace.arrived_s * 1000 + trace.total_ms


def _sums(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for count in counts:
        sums.update(count)
    return sums


def _summary(times_ms: Iterable[float]) -> cluster_pb2.RecentTimes:
    times = RecentTimes.of(times_ms)
    return cluster_pb2.RecentTimes(count=times.count, p50_ms=times.p50_ms, p99_ms=times.p99_ms)


def _merge_replicas(
    replicas: Iterable[cluster_pb2.ReplicaStatus],
    others: Iterable[cluster_pb2.GetClusterResponse],
) -> list[cluster_pb2.ReplicaStatus]:
    """Returns the replicas, each with the worst state that a process sees."""
    merged = {(replica.model, replica.address): replica for replica in replicas}
    for other in others:
        for replica in other.replicas:
            known = merged.setdefault((replica.model, replica.address), replica)
            if _BY_SEVERITY.index(replica.state) > _BY_SEVERITY.index(known.state):
                known.state, known.problem = replica.state, replica.problem
    models = list(dict.fromkeys(replica.model for replica in merged.values()))
    return sorted(merged.values(), key=lambda r: (models.index(r.model), r.role, r.address))
