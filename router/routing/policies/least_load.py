"""`LeastLoadPolicy`: the shortest backlog, whatever is cached. Pure."""

from collections.abc import Sequence

from typing_extensions import override

from router.routing.candidate import Prompt
from router.routing.costs import Cost
from router.routing.policy import RoutingPolicy, TierName

__all__ = ["LeastLoadPolicy", "load_of"]


def load_of(cost: Cost) -> tuple[float, int, float, str]:
    """Returns what loads are sorted by, the least first: seconds, requests, blocks."""
    return cost.backlog_s, cost.num_requests, cost.used_share, cost.replica_id


class LeastLoadPolicy(RoutingPolicy):
    """Chooses the replica with the least work in seconds, for prompts that share nothing."""

    name = "least-load"

    @override
    def choose(self, tier: TierName, costs: Sequence[Cost], prompt: Prompt) -> tuple[Cost, str]:
        return min(costs, key=load_of), "least backlog"
