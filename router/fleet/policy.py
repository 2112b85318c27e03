"""Routing policy: which replica takes a request, and where its prompt is computed.

The stages gather the facts and these pure functions decide. Costs follow the KV-aware
router of NVIDIA Dynamo (work still to do plus work already held), in the unit that the
tier is short of: blocks for decode, tokens for prefill. `PrefixIndex` estimates which
prefixes replicas cache.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "PrefixIndex",
    "ReplicaState",
    "pick_decode",
    "pick_prefill",
    "wants_remote_prefill",
]


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The load and cache of one replica at the moment of choosing.

    A block has as many tokens as one block key stands for, whatever the replica's own
    block size is.

    Attributes:
        replica_id: names the replica; breaks ties, so that equal states lead to equal choices.
        num_requests: requests running and waiting there.
        num_queued_tokens: prompt tokens that it has still to compute.
        num_free_blocks: blocks that no request holds.
        num_blocks: blocks in its pool.
        overlap_blocks: leading blocks of the prompt that it probably caches.
        weight: the share of the load that it should get, beside a replica of weight 1.
    """

    replica_id: str
    num_requests: int
    num_queued_tokens: int
    num_free_blocks: int
    num_blocks: int
    overlap_blocks: int
    weight: float = 1.0


def pick_decode(candidates: Sequence[ReplicaState], num_prompt_blocks: int) -> str | None:
    """The id of the decode replica that should generate; None without candidates.

    Replicas with room for the prompt's missing blocks are preferred, since the
    request would have to wait for the others. Among equals the least
    `missing blocks + held blocks` wins: the blocks that must be moved or computed
    there, plus the KV that each of its steps already reads. A replica's weight divides this cost.
    """

    def cost(state: ReplicaState) -> tuple[bool, float, int, str]:
        missing_blocks = max(num_prompt_blocks - state.overlap_blocks, 0)
        held_blocks = state.num_blocks - state.num_free_blocks
        lacks_room = missing_blocks > state.num_free_blocks
        load = (missing_blocks + held_blocks) / state.weight
        return (lacks_room, load, state.num_requests, state.replica_id)

    best = min(candidates, key=cost, default=None)
    return best.replica_id if best else None


def pick_prefill(
    candidates: Sequence[ReplicaState], num_prompt_tokens: int, block_size: int
) -> str | None:
    """The id of the prefill replica that should compute the prompt; None without candidates.

    The least `uncached tokens + queued tokens` wins: the tokens that must be
    computed there before this prompt's first token can be drawn. A replica's weight divides this
    cost.
    """

    def cost(state: ReplicaState) -> tuple[float, int, str]:
        uncached_tokens = _uncached_tokens(num_prompt_tokens, state.overlap_blocks * block_size)
        load = (uncached_tokens + state.num_queued_tokens) / state.weight
        return (load, state.num_requests, state.replica_id)

    best = min(candidates, key=cost, default=None)
    return best.replica_id if best else None


def wants_remote_prefill(
    num_prompt_tokens: int, cached_tokens: int, max_local_prefill_tokens: int
) -> bool:
    """Whether the part of the prompt not cached on decode is worth a remote prefill.

    Args:
        num_prompt_tokens: tokens in the prompt.
        cached_tokens: leading tokens that the decode replica probably caches.
        max_local_prefill_tokens: the longest remainder that decode computes
            itself, because a handoff costs more than the delay of its running batch.
    """
    return _uncached_tokens(num_prompt_tokens, cached_tokens) > max_local_prefill_tokens


def _uncached_tokens(num_prompt_tokens: int, cached_tokens: int) -> int:
    """Tokens to compute; at least the last one, whose logits the next token is drawn from."""
    return max(num_prompt_tokens - cached_tokens, 1)


class PrefixIndex:
    """Which prefixes each replica probably caches, by block key.

    The index records where this router sent prompts; it asks no replica. It may be
    wrong in both directions, which costs time and never correctness. Each replica has
    a least-recently-used table of its own, with no more keys than the replica's pool has blocks.

    Args:
        max_blocks_per_replica: the most keys remembered per replica, however large its pool is.
    """

    def __init__(self, max_blocks_per_replica: int) -> None:
        self._max_blocks = max_blocks_per_replica
        self._tables: dict[str, OrderedDict[bytes, None]] = {}

    def record(self, replica_id: str, keys: Sequence[bytes], num_blocks: int) -> None:
        """Notes that the replica, whose pool has `num_blocks`, now holds the blocks of this prefix.
        O(1) per key.
        """
        table = self._tables.setdefault(replica_id, OrderedDict())
        # In reverse, so that a prefix is evicted from its end: its blocks are useless without
        # the ones before them.
        for key in reversed(keys):
            table[key] = None
            table.move_to_end(key)
        while len(table) > min(self._max_blocks, num_blocks):
            table.popitem(last=False)

    def overlap(self, replica_id: str, keys: Sequence[bytes]) -> int:
        """Returns how many leading blocks of this prefix the replica probably caches."""
        table = self._tables.get(replica_id)
        for index, key in enumerate(keys):
            if table is None or key not in table:
                return index
        return len(keys)

    def forget(self, replica_id: str) -> None:
        """Drops the table of a replica that restarted or left. Unknown ids are no error."""
        self._tables.pop(replica_id, None)

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables.values())
