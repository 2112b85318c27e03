"""Routing policy: which replica takes a request, and where its prompt is computed.

The stages gather the facts and these pure functions decide. Costs follow the KV-aware
router of NVIDIA Dynamo (work still to do plus work already held), in the unit that the
tier is short of: blocks for decode, tokens for prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
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
