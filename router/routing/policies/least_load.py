"""`LeastLoadPolicy`: the shortest backlog, whatever is cached. Pure."""

from collections.abc import Sequence

from typing_extensions import override

from router.routing.candidate import Prompt
from router.routing.costs import Score
from router.routing.policy import RoutingPolicy, TierName

__all__ = ["LeastLoadPolicy", "load_of"]


def load_of(score: Score) -> tuple[float, int, float, str]:
    """Returns what loads are sorted by, the least first: seconds, requests, blocks."""
    used_share, *_, num_requests = score.fullness
    return score.backlog_s, num_requests, used_share, score.replica_id


class LeastLoadPolicy(RoutingPolicy):
    """Chooses the replica with the least work in seconds, for prompts that share nothing."""

    name = "least-load"

    @override
    def choose(self, tier: TierName, scores: Sequence[Score], prompt: Prompt) -> tuple[Score, str]:
        return min(scores, key=load_of), "least backlog"
