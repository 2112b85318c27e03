"""The state of a router, and its records, out of those of its processes."""

from baton.v1 import cluster_pb2
from baton.v1.router_process_pb2 import GetProcessResponse
from router.processes.merged_states import merge_states, merge_traces


def replica(address: str, state: str = "READY", **fields) -> cluster_pb2.ReplicaStatus:
    number = cluster_pb2.ReplicaState.Value(f"REPLICA_STATE_{state}")
    return cluster_pb2.ReplicaStatus(model="m", address=address, state=number, **fields)


def state(*replicas, times=(), warnings=(), **activity) -> GetProcessResponse:
    cluster = cluster_pb2.GetClusterResponse(
        version="1",
        uptime_s=activity.pop("uptime_s", 1),
        replicas=replicas,
        warnings=warnings,
        activity=cluster_pb2.RouterActivity(**activity),
    )
    return GetProcessResponse(cluster=cluster, first_token_ms=times, token_ms=times)


def test_requests_are_those_of_all_processes():
    errors = [cluster_pb2.RecentError(time_s=i, request_id=str(i)) for i in range(30)]
    merged = merge_states(
        [
            state(num_running=2, finished={"stop": 1}, errors=errors[20::-1], times=[1, 2, 3]),
            state(num_running=3, finished={"stop": 2, "length": 1}, errors=errors[:20:-1]),
            state(waiting={"m": 2, "n": 1}),
            state(waiting={"m": 5}),
            state(failed={"INTERNAL": 1}, num_resumes=4, times=[100], uptime_s=7),
        ],
        silent=[3],
    )
    activity = merged.activity
    assert (activity.num_running, activity.num_resumes) == (5, 4)
    assert dict(activity.finished) == {"stop": 3, "length": 1}
    assert dict(activity.failed) == {"INTERNAL": 1}
    assert dict(activity.waiting) == {"m": 7, "n": 1}
    assert [error.request_id for error in activity.errors] == [str(i) for i in range(29, 9, -1)]
    assert (activity.first_token.count, activity.token.p50_ms) == (4, 3)
    assert activity.first_token.p99_ms == 100
    assert (merged.uptime_s, merged.num_processes) == (7, 5)
    assert merged.warnings == ["process 3 of the router has not answered in time"]


def test_a_replica_has_the_worst_state_that_a_process_sees():
    merged = merge_states(
        [
            state(replica("a"), replica("b", "EJECTED"), warnings=["odd stores"]),
            state(replica("a", "LOST", problem="refused"), replica("b"), warnings=["odd stores"]),
            state(replica("a", "DRAINING"), replica("c")),
        ]
    )
    shown = [(one.address, one.state, one.problem) for one in merged.replicas]
    assert shown == [
        ("a", cluster_pb2.REPLICA_STATE_LOST, "refused"),
        ("b", cluster_pb2.REPLICA_STATE_EJECTED, ""),
        ("c", cluster_pb2.REPLICA_STATE_READY, ""),
    ]
    assert merged.warnings == ["odd stores"]


def test_records_are_in_the_order_of_their_ends():
    answers = [
        cluster_pb2.GetTraceResponse(
            traces=[
                cluster_pb2.RequestTrace(request_id=name, arrived_s=at, total_ms=ms)
                for name, at, ms in records
            ]
        )
        for records in ([("b", 2, 100), ("a", 1, 100)], [("d", 0, 9000), ("c", 3, 100)])
    ]
    assert [trace.request_id for trace in merge_traces(answers, 3)] == ["d", "c", "b"]
    slowest = merge_traces(answers, 2, slowest=True)
    assert [trace.total_ms for trace in slowest] == [9000, 100]
