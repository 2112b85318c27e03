"""`ConsistentHashPolicy`: a key has a home, unless that is overloaded. Pure.

Rendezvous hashing (Thaler and Ravishankar 1998): each replica draws a number from the key and its
id, and the largest wins. All routers agree without talking to each other, and a replica that comes
or goes moves only its own share of the keys. Loads are bounded as in Mirrokni, Thorup and
Zadimoghaddam, Consistent hashing with bounded loads, 2018.
"""

from collections.abc import Sequence
from hashlib import blake2b
from statistics import fmean

from typing_extensions import override

from router.routing.candidate import Prompt
from router.routing.costs import Score
from router.routing.policy import RoutingPolicy, TierName

__all__ = ["ConsistentHashPolicy"]

_MAX_LOAD = 1.25
"""A home has at most this multiple of the mean load of all replicas."""


class ConsistentHashPolicy(RoutingPolicy):
    """Chooses the home of a request's session, or of the first 1,024 tokens of its prompt. If the
    home is overloaded, the next one in the key's own order is chosen.
    """

    name = "consistent-hash"

    @override
    def choose(self, tier: TierName, scores: Sequence[Score], prompt: Prompt) -> tuple[Score, str]:
        homes = sorted(scores, key=lambda s: _draw(prompt.key, s.replica_id), reverse=True)
        max_load_s = _MAX_LOAD * fmean(score.backlog_s for score in scores)
        # There is one: the least loaded replica has at most the mean load.
        chosen = next(score for score in homes if score.backlog_s <= max_load_s)
        is_home = chosen is homes[0]
        return chosen, "home of its key" if is_home else "the home of its key is overloaded"


def _draw(key: bytes, replica_id: str) -> bytes:
    return blake2b(key, key=replica_id.encode()[:64], digest_size=8).digest()
