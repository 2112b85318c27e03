"""`RoutingPolicy`: chooses the replicas of a request. Pure.

A policy is one file in `router.routing.policies`; other packages offer theirs by entry point:

    [project.entry-points."baton.routing_policies"]
    cheapest = "their_package:CheapestPolicy"
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import itemgetter
from typing import ClassVar, Literal, NamedTuple

from router.routing.candidate import Candidate, Prompt, with_speeds
from router.routing.costs import (
    Cost,
    Score,
    decode_cost,
    decode_scores,
    prefill_cost,
    prefill_scores,
)

__all__ = ["Choice", "PolicySettings", "RoutingPolicy", "TierName"]

TierName = Literal["prefill", "decode"]
_MAX_SHOWN = 3
_lacks_room = itemgetter(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of policies.

    Attributes:
        max_affinity_delay_s: seconds by which a prompt may start later than elsewhere on the
            replica that caches it, at most.
    """

    max_affinity_delay_s: float = 4.0


class Choice(NamedTuple):
    """A chosen replica, and why.

    Attributes:
        tier: prefill or decode.
        policy: the policy's name.
        reason: why it was chosen, in words.
        costs: its cost, then those of the two best others.
        num_candidates: how many replicas could have been chosen.
    """

    tier: TierName
    policy: str
    reason: str
    costs: tuple[Cost, ...]
    num_candidates: int

    @property
    def cost(self) -> Cost:
        """The cost on the chosen replica."""
        return self.costs[0]

    @property
    def replica_id(self) -> str:
        """The chosen replica."""
        return self.costs[0].replica_id


class RoutingPolicy(ABC):
    """Chooses replicas for requests. A subclass decides in `choose`.

    A policy is called by one event loop, and must not wait for anything.

    Args:
        settings: the settings of policies.

    Attributes:
        name: names the policy in traces.
    """

    name: ClassVar[str]

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def pick_prefill(self, candidates: Sequence[Candidate], prompt: Prompt) -> Choice | None:
        """Chooses the replica that computes a prompt; None without candidates."""
        return self._pick("prefill", prefill_scores(with_speeds(candidates), prompt), prompt)

    def pick_decode(self, candidates: Sequence[Candidate], prompt: Prompt) -> Choice | None:
        """Chooses the replica that generates; None without candidates.

        A replica in whose pool a request would wait for blocks is chosen only if all are such.
        """
        scores = decode_scores(with_speeds(candidates), prompt)
        if any(map(_lacks_room, scores)):
            scores = [score for score in scores if not score.lacks_room] or scores
        return self._pick("decode", scores, prompt)

    @abstractmethod
    def choose(self, tier: TierName, scores: Sequence[Score], prompt: Prompt) -> tuple[Score, str]:
        """Returns one of the scores, that of the chosen replica, and why it was chosen.

        Args:
            tier: prefill or decode.
            scores: at least one.
            prompt: the request.
        """

    def _pick(self, tier: TierName, scores: Sequence[Score], prompt: Prompt) -> Choice | None:
        if not scores:
            return None
        chosen, reason = self.choose(tier, scores, prompt)
        best = nsmallest(_MAX_SHOWN, scores)
        shown = [chosen, *(score for score in best if score is not chosen)][:_MAX_SHOWN]
        cost = prefill_cost if tier == "prefill" else decode_cost
        costs = tuple(cost(score, prompt) for score in shown)
        return Choice(tier, self.name, reason, costs, len(scores))
