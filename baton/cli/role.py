"""`baton role`: changes the tier of a running worker."""

import argparse

from baton.cli.operator_calls import CALL_TIMEOUT_S, add_operator_args, calling_router
from baton.v1 import cluster_pb2, worker_pb2

__all__ = ["add_args", "main"]

# By name: the role, and the requests that a worker with it takes.
_ROLES = {
    "prefill": (worker_pb2.WORKER_ROLE_PREFILL, "prompts to compute for others"),
    "decode": (worker_pb2.WORKER_ROLE_DECODE, "requests to decode"),
    "both": (worker_pb2.WORKER_ROLE_BOTH, "requests of both tiers"),
}


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "replica", metavar="REPLICA", help="the worker's address or id, as `baton top` has it"
    )
    parser.add_argument("role", choices=_ROLES, help="the requests that it takes from now on")
    add_operator_args(parser)


def main(args: argparse.Namespace) -> int:
    """Changes which requests a worker takes: those of the prefill tier, the decode tier, or both.

    The model stays loaded. Requests that the worker decodes move to other decode workers with
    their KV. A restarted worker has the tier again that it was started in.
    """
    role, work = _ROLES[args.role]
    request = cluster_pb2.ChangeReplicaRoleRequest(replica=args.replica, role=role)
    with calling_router(args) as router:
        router.stub.ChangeReplicaRole(request, timeout=CALL_TIMEOUT_S, metadata=router.metadata)
    print(f"{args.replica} takes {work}")
    return 0
