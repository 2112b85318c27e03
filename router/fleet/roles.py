"""Roles of workers, and the tiers that they serve in."""

from baton.v1 import worker_pb2

__all__ = ["serves_in", "tier_name"]


_BOTH = worker_pb2.WORKER_ROLE_BOTH


def serves_in(
    role: "worker_pb2.WorkerRole.ValueType", tier: "worker_pb2.WorkerRole.ValueType"
) -> bool:
    """Returns whether a worker with a role takes requests of a tier."""
    return role in (tier, _BOTH)


def tier_name(tier: "worker_pb2.WorkerRole.ValueType") -> str:
    """Returns prefill or decode."""
    return worker_pb2.WorkerRole.Name(tier).removeprefix("WORKER_ROLE_").lower()
