"""Which replica lends a prompt's beginning to the one that computes the prompt. Pure.

Between peers the KV of a prefix moves straight from one replica's pool to another's. That is worth
it where moving takes clearly less time than computing (docs/adr/0078-sessions-and-pulls.md).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["AnswerTime", "PrefixHolder", "Pull", "PullCosts", "choose_pull"]

# How many times longer computing must take than pulling: both are estimates, and a pull that fails
# has cost its time.
_MIN_GAIN = 2.0
# The longest wait for a replica that is asked to lend. Its step under way must end first.
_MAX_WAIT_S = 2.0
# Weight of the newest answer in the mean time of answers, and what is assumed before the first.
_NEWEST_WEIGHT = 0.2
_FIRST_ANSWER_S = 0.01
# How fast the mean returns to that without answers: if it were too long for any pull, no replica
# would be asked again, and it would stay so.
_ANSWER_MEMORY_S = 30.0


class AnswerTime:
    """How long replicas take to answer that they lend a prefix.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mean_s = _FIRST_ANSWER_S
        self._noted_at = clock()

    @property
    def expected_s(self) -> float:
        """How long the next answer will probably take."""
        kept = math.exp((self._noted_at - self._clock()) / _ANSWER_MEMORY_S)
        return _FIRST_ANSWER_S + kept * (self._mean_s - _FIRST_ANSWER_S)

    def add(self, answer_s: float) -> None:
        """Takes the time of an answer."""
        expected_s = self.expected_s
        self._mean_s = expected_s + _NEWEST_WEIGHT * (answer_s - expected_s)
        self._noted_at = self._clock()

    def add_failed(self, waited_s: float) -> None:
        """Takes how long an answer was waited for that did not come. It would have taken even
        longer; one that fails at once says nothing.
        """
        if waited_s > self.expected_s:
            self.add(waited_s)


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A replica that may lend the beginning of a prompt.

    Attributes:
        replica_id: names the replica; breaks ties, so that equal facts lead to equal choices.
        address: its `host:port`.
        num_blocks: leading blocks of the prompt that it probably caches.
        num_requests: requests running and waiting there.
    """

    replica_id: str
    address: str
    num_blocks: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class PullCosts:
    """What the replica that computes a prompt takes per token, in seconds.

    Attributes:
        compute_s: to compute a token of a prompt; 0 if that is not known.
        load_s: to load the KV of a token from a peer.
        ask_s: to ask a peer for the prefix, once for all tokens.
    """

    compute_s: float
    load_s: float
    ask_s: float


@dataclass(frozen=True, slots=True)
class Pull:
    """A prefix to pull.

    Attributes:
        holder: the replica that lends it.
        num_blocks: leading blocks of the prompt to ask for.
        num_tokens: tokens in those of them that the other replica lacks.
        wait_s: how long to wait until the replica lends.
        gain_s: seconds that the pull saves, by the estimates.
    """

    holder: PrefixHolder
    num_blocks: int
    num_tokens: int
    wait_s: float
    gain_s: float


def choose_pull(
    holders: Iterable[PrefixHolder],
    costs: PullCosts,
    *,
    num_prompt_tokens: int,
    cached_blocks: int,
    block_size: int,
) -> Pull | None:
    """Returns what to pull from where; None if computing is as good.

    The longest prefix wins, and among replicas with equal ones the least busy replica.

    Args:
        holders: the replicas that can lend.
        costs: those of the replica that computes the prompt.
        num_prompt_tokens: tokens in the prompt, the last of which is computed in any case.
        cached_blocks: leading blocks of the prompt that this replica caches itself.
        block_size: tokens per block.
    """
    most = (num_prompt_tokens - 1) // block_size
    longer = [holder for holder in holders if min(holder.num_blocks, most) > cached_blocks]
    best = min(
        longer,
        key=lambda holder: (
            -min(holder.num_blocks, most),
            holder.num_requests,
            holder.replica_id,
        ),
        default=None,
    )
    if best is None:
        return None
    num_blocks = min(best.num_blocks, most)
    num_tokens = (num_blocks - cached_blocks) * block_size
    compute_s, pull_s = num_tokens * costs.compute_s, costs.ask_s + num_tokens * costs.load_s
    if pull_s * _MIN_GAIN > compute_s:
        return None
    gain_s = compute_s - pull_s
    # A replica that does not answer costs no more than half of what was to be gained.
    return Pull(best, num_blocks, num_tokens, min(gain_s / 2, _MAX_WAIT_S), gain_s)
