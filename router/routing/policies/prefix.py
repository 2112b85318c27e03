"""`PrefixPolicy`: prompts stay where they are cached, unless that takes too long. Pure.

A sum of weighted scores for cache and load is hard to predict and hard to tune. As in the prefix
affinity of llm-d's router, the warm replicas are used alone until their backlog is too long; then
costs alone decide. Costs are in seconds, so that one number says what too long means.
"""

from collections.abc import Sequence

from typing_extensions import override

from router.routing.candidate import Prompt
from router.routing.costs import Score, best_of
from router.routing.policy import RoutingPolicy, TierName

__all__ = ["PrefixPolicy"]

_MIN_WARM_SHARE = 0.5
"""A replica is warm if it caches this share of a prompt. Real conversations are cached nearly
whole or hardly at all; a beginning that most prompts share makes no replica warm."""
_MAX_DELAY_PER_SAVED = 4.0
"""Seconds of delay per second that the cached tokens save (docs/adr/0075-costs-in-seconds.md)."""


class PrefixPolicy(RoutingPolicy):
    """Chooses the least cost in seconds. On prefill the replica that caches most of a prompt is
    preferred, if that is at least half, while it is later than the best other one by no more than
    the tolerated delay: otherwise conversations would move at every wave of load. A move computes
    what was cached again, which the costs contain. It also evicts as much of others, and the next
    turns of the conversation find a part of it in each place, which the costs do not contain: so
    the delay is at most a multiple of what is saved, too.
    """

    name = "prefix"

    @override
    def choose(self, tier: TierName, scores: Sequence[Score], prompt: Prompt) -> tuple[Score, str]:
        home = prompt.homes.get(tier, "")
        best = best_of(scores, home)
        if tier == "decode":
            return best, "least cost"
        most_cached = max(score.cached_tokens for score in scores)
        if most_cached < _MIN_WARM_SHARE * prompt.num_tokens:
            return best, "least cost"
        warmest = best_of([score for score in scores if score.cached_tokens == most_cached], home)
        delay_s, saved_s = warmest.seconds - best.seconds, best.work_s - warmest.work_s
        if delay_s <= min(self._settings.max_affinity_delay_s, _MAX_DELAY_PER_SAVED * saved_s):
            return warmest, "caches most of the prompt"
        return best, f"the warmest replica is later by {delay_s:.3f} s"
