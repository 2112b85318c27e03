"""Metrics of the replicas of all models, read when they are scraped."""

from collections.abc import Iterator

from router.models import Models
from router.observe.metrics import FleetCounts, ReplicaGauges

__all__ = ["fleet_counts", "replica_gauges"]


def fleet_counts(models: Models) -> Iterator[FleetCounts]:
    """The replicas of each model and tier, by state."""
    for model in models:
        for tier in (model.fleet.prefill, model.fleet.decode):
            yield FleetCounts(
                model.name,
                tier.name,
                connected=sum(r.has_role for r in tier.connected),
                ready=len(tier.candidates),
                ejected=sum(r.is_ejected for r in tier.candidates),
            )


def replica_gauges(models: Models) -> Iterator[ReplicaGauges]:
    """The backlog, the requests and the hit rate of each connected replica."""
    for model in models:
        for tier in (model.fleet.prefill, model.fleet.decode):
            for replica in tier.connected:
                if replica.has_role:
                    yield ReplicaGauges(
                        model.name,
                        tier.name,
                        replica.address,
                        backlog_s=replica.backlog_s,
                        num_requests=replica.num_requests,
                        hit_rate=replica.hit_rate,
                    )
