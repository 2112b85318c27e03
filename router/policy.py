"""Routing policy: which replica takes a request, and where its prompt is computed.

Pure functions over frozen inputs: the pipeline gathers the facts, this file
decides. Costs follow the KV-aware router of NVIDIA Dynamo (work still to do
plus work already held), in the unit that the tier is short of: blocks for
decode, tokens for prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ReplicaState", "pick_decode", "pick_prefill", "wants_remote_prefill"]


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What the router knows of one replica at the moment of choosing.

    Blocks are of the size that keys name, whatever the replica's own are.

    Attributes:
        replica_id: names the replica; breaks ties, so that choices repeat.
        num_requests: requests running and waiting there.
        num_queued_tokens: prompt tokens it has still to compute.
        num_free_blocks: blocks that no request holds.
        num_blocks: blocks in its pool.
        overlap_blocks: leading blocks of the prompt that it probably caches.
    """

    replica_id: str
    num_requests: int
    num_queued_tokens: int
    num_free_blocks: int
    num_blocks: int
    overlap_blocks: int


def pick_decode(candidates: Sequence[ReplicaState], num_prompt_blocks: int) -> str | None:
    """The decode replica that should generate; None without candidates.

    Replicas with room for the prompt's missing blocks come before those
    without, for which the request would wait. Among equals the least
    `missing blocks + held blocks` wins: what must be moved or computed there,
    plus the KV that each of its steps already reads.
    """

    def cost(state: ReplicaState) -> tuple[bool, int, int, str]:
        missing_blocks = max(num_prompt_blocks - state.overlap_blocks, 0)
        held_blocks = state.num_blocks - state.num_free_blocks
        lacks_room = missing_blocks > state.num_free_blocks
        return (lacks_room, missing_blocks + held_blocks, state.num_requests, state.replica_id)

    best = min(candidates, key=cost, default=None)
    return best.replica_id if best else None


def pick_prefill(
    candidates: Sequence[ReplicaState], num_prompt_tokens: int, block_size: int
) -> str | None:
    """The prefill replica that should compute the prompt; None without candidates.

    The least `uncached tokens + queued tokens` wins: the tokens that must be
    computed there before this prompt's first token can be drawn.
    """

    def cost(state: ReplicaState) -> tuple[int, int, str]:
        uncached_tokens = _uncached_tokens(num_prompt_tokens, state.overlap_blocks * block_size)
        return (uncached_tokens + state.num_queued_tokens, state.num_requests, state.replica_id)

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
            itself: it disturbs the running batch less than a handoff costs.
    """
    return _uncached_tokens(num_prompt_tokens, cached_tokens) > max_local_prefill_tokens


def _uncached_tokens(num_prompt_tokens: int, cached_tokens: int) -> int:
    """Tokens to compute: at least the last one, whose logits draw the next."""
    return max(num_prompt_tokens - cached_tokens, 1)
