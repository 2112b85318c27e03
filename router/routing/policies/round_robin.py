"""`RoundRobinPolicy`: one replica after the other. Pure."""

from collections.abc import Sequence
from operator import attrgetter

from typing_extensions import override

from router.routing.candidate import Prompt
from router.routing.costs import Score
from router.routing.policy import PolicySettings, RoutingPolicy, TierName

__all__ = ["RoundRobinPolicy"]


class RoundRobinPolicy(RoutingPolicy):
    """Chooses the replicas of a tier in turn, in the order of their ids; neither load nor cache
    counts. A reference for measurements.
    """

    name = "round-robin"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._last: dict[TierName, str] = {}

    @override
    def choose(self, tier: TierName, scores: Sequence[Score], prompt: Prompt) -> tuple[Score, str]:
        in_turn = sorted(scores, key=attrgetter("replica_id"))
        last = self._last.get(tier, "")
        chosen = next((score for score in in_turn if score.replica_id > last), in_turn[0])
        self._last[tier] = chosen.replica_id
        return chosen, "its turn"
