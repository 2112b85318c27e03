"""`PowerOfTwoPolicy`: the less busy one of two random replicas. Pure.

Mitzenmacher, The power of two choices in randomized load balancing, 2001: routers that know only
late reports do not all run to the same replica.
"""

import random
from collections.abc import Sequence

from typing_extensions import override

from router.routing.candidate import Prompt
from router.routing.costs import Score
from router.routing.policies.least_load import load_of
from router.routing.policy import PolicySettings, RoutingPolicy, TierName

__all__ = ["PowerOfTwoPolicy"]


class PowerOfTwoPolicy(RoutingPolicy):
    """Draws two replicas and chooses the one with less work in seconds."""

    name = "power-of-two"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._random = random.Random()

    @override
    def choose(self, tier: TierName, scores: Sequence[Score], prompt: Prompt) -> tuple[Score, str]:
        drawn = self._random.sample(scores, min(2, len(scores)))
        return min(drawn, key=load_of), "less backlog than another one drawn"
