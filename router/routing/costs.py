"""What a request costs on a replica, in seconds. Pure.

Engines measure how fast they are, so no weights have to be tuned, and a replica that is half as
fast counts for half.

On the prefill tier a prompt costs the time until its first token can be drawn: the queue of the
replica, then its uncached tokens. Tokens that a shared store holds are loaded if that is quicker
than computing them. On the decode tier it costs the time to bring its KV there, and the time that
its tokens take beside the sequences that run there already.
"""

from collections.abc import Sequence
from typing import NamedTuple

from router.routing.candidate import Candidate, Prompt

__all__ = [
    "Cost",
    "PrefillPlaces",
    "best_of",
    "compare_places",
    "decode_cost",
    "order_of",
    "prefill_cost",
    "wants_remote_prefill",
]

_HANDOFF_S = 0.004
"""What a remote prefill takes besides its work and the bytes: calls, look-ups, waits for steps."""
_EQUAL = 1.05
"""Costs up to this multiple of the least one are as good: measurements vary by more."""
_MAX_LOCAL_TOKENS = 16
"""So few tokens are always computed by decode: they fit into a step of its sequences."""


class Cost(NamedTuple):
    """The cost of one request on one replica.

    Attributes:
        replica_id: the replica.
        address: its `host:port`.
        seconds: what replicas are compared by: the parts below, over the replica's weight.
        backlog_s: the part of it that has nothing to do with the request's KV: the queue, or on
            decode the sequences there.
        cached_tokens: leading tokens of the prompt that the replica caches.
        saved_s: seconds to compute these.
        uncached_tokens: tokens that it would compute, or on decode have to get.
        compute_s: seconds to compute them.
        load_s: seconds to load those that are loaded.
        queue_s: seconds of prompt work before them.
        decode_s: seconds in which the request's tokens are generated; 0 on prefill.
        lacks_room: whether the request would wait for blocks of the pool.
        used_share: the share of the pool's blocks that requests hold.
        cached_share: the share of them that is in the prefix cache.
        num_requests: requests that are there.
        weight: the replica's share of the load, which divides the seconds.
    """

    replica_id: str
    address: str
    seconds: float
    backlog_s: float
    cached_tokens: int
    saved_s: float
    uncached_tokens: int
    compute_s: float
    load_s: float
    queue_s: float
    decode_s: float
    lacks_room: bool
    used_share: float
    cached_share: float
    num_requests: int
    weight: float


def order_of(cost: Cost) -> tuple[bool, float, str]:
    """Returns what costs are sorted by, the best first: room and seconds."""
    return cost.lacks_room, cost.seconds, cost.replica_id


def best_of(costs: Sequence[Cost], home: str = "") -> Cost:
    """Returns the best of one or more costs.

    Seconds are measured, so a small difference says nothing. Of nearly equal ones that of the
    session's home is the best, then that with the most free blocks, then the one that caches
    least: otherwise the replica that seems the fastest would cache all conversations while the
    others idle.

    Args:
        costs: the costs.
        home: the replica that served the last turn of the request's session; empty if none is
            known.
    """
    least = min(costs, key=order_of)
    max_s = _EQUAL * least.seconds
    equals = [c for c in costs if c.seconds <= max_s and c.lacks_room == least.lacks_room]
    at_home = next((cost for cost in equals if cost.replica_id == home), None)
    return at_home or min(equals, key=_blocks_order)


def _blocks_order(cost: Cost) -> tuple[float, float, int, float, str]:
    return cost.used_share, cost.cached_share, cost.num_requests, cost.seconds, cost.replica_id


def prefill_cost(candidate: Candidate, prompt: Prompt) -> Cost:
    """Returns what computing a prompt costs."""
    cached_tokens, uncached_tokens, load_s = _work(candidate, prompt)
    compute_s = uncached_tokens * candidate.prompt_token_s
    queue_s, weight = candidate.queue_s, candidate.weight
    return Cost._make(  # in half the time of a call
        (
            candidate.replica_id,
            candidate.address,
            (compute_s + load_s + queue_s) / weight,
            queue_s / weight,
            cached_tokens,
            cached_tokens * candidate.prompt_token_s,
            uncached_tokens,
            compute_s,
            load_s,
            queue_s,
            0.0,
            False,
            candidate.used_share,
            candidate.cached_share,
            candidate.num_requests,
            weight,
        )
    )


def decode_cost(candidate: Candidate, prompt: Prompt) -> Cost:
    """Returns what generating costs. If no prefill replica computes the prompt, its computation
    is a part of it.

    The tokens take `decode_step_s` each while all seats are taken, and accordingly less while
    fewer are.
    """
    cached_tokens, uncached_tokens, load_s = _work(candidate, prompt)
    compute_s, queue_s = uncached_tokens * candidate.prompt_token_s, candidate.queue_s
    missing_tokens = max(prompt.num_tokens - cached_tokens, 1)
    if prompt.has_prefill_tier:
        missing_tokens = max(_moved_tokens(candidate, prompt), 1)
        uncached_tokens, load_s = missing_tokens, missing_tokens * candidate.load_token_s
        compute_s = queue_s = 0.0
    taken_share = (candidate.num_requests + 1) / candidate.num_seats
    decode_s = prompt.num_output_tokens * taken_share * candidate.decode_step_s
    missing_blocks = -(-missing_tokens // prompt.block_size)
    backlog_s, weight = queue_s + decode_s, candidate.weight
    return Cost._make(  # in half the time of a call
        (
            candidate.replica_id,
            candidate.address,
            (compute_s + load_s + backlog_s) / weight,
            backlog_s / weight,
            cached_tokens,
            cached_tokens * candidate.prompt_token_s,
            uncached_tokens,
            compute_s,
            load_s,
            queue_s,
            decode_s,
            missing_blocks > candidate.num_free_blocks,
            candidate.used_share,
            candidate.cached_share,
            candidate.num_requests,
            weight,
        )
    )


def _work(candidate: Candidate, prompt: Prompt) -> tuple[int, int, float]:
    """Returns how many tokens are cached, how many are to be computed, and the seconds to load the
    others. At least one token is computed: the next one is drawn from its logits.
    """
    num_tokens = prompt.num_tokens
    if not prompt.reuses_kv:
        return 0, num_tokens, 0.0
    cached_tokens = min(prompt.match.blocks(candidate.replica_id) * prompt.block_size, num_tokens)
    uncached_tokens = num_tokens - cached_tokens or 1
    if candidate.store_ids and candidate.load_token_s < candidate.prompt_token_s:
        stored_tokens = min(prompt.stored_tokens(candidate.store_ids), num_tokens - 1)
        if (loaded_tokens := stored_tokens - cached_tokens) > 0:
            load_s = loaded_tokens * candidate.load_token_s
            return cached_tokens, uncached_tokens - loaded_tokens, load_s
    return cached_tokens, uncached_tokens, 0.0


def _moved_tokens(candidate: Candidate, prompt: Prompt) -> int:
    """Tokens whose KV a decode replica loads with a handoff. This brings states, too, so that the
    replica uses KV that it could not go on from.
    """
    if not prompt.reuses_kv:
        return prompt.num_tokens
    held_tokens = prompt.match.kv_blocks(candidate.replica_id) * prompt.block_size
    return max(prompt.num_tokens - held_tokens, 0)


class PrefillPlaces(NamedTuple):
    """What a prompt costs where it can be computed.

    Attributes:
        local_s: seconds that all requests together lose if decode computes it.
        remote_s: the same if a prefill replica does.
    """

    local_s: float
    remote_s: float


def compare_places(decode: Candidate, prompt: Prompt, prefill: Cost | None) -> PrefillPlaces | None:
    """Compares the computation of a prompt by its decode replica and by a prefill replica.

    While decode computes a prompt, each of its sequences waits. If none runs yet, one is counted:
    others will come. A prefill replica delays nobody who decodes, but the KV has to be moved.

    Args:
        decode: the replica that will generate.
        prompt: the request.
        prefill: the cost on the best prefill replica; None if there is none, or if its speed is
            not known.

    Returns:
        None if there is nothing to compare.
    """
    if prefill is None or not decode.has_speeds:
        return None
    cost = prefill_cost(decode, prompt)
    num_delayed = 1 + max(decode.num_requests, 1)
    local_s = cost.queue_s + cost.load_s + cost.compute_s * num_delayed
    move_s = _moved_tokens(decode, prompt) * decode.load_token_s + _HANDOFF_S
    return PrefillPlaces(local_s, prefill.queue_s + prefill.load_s + prefill.compute_s + move_s)


def wants_remote_prefill(
    num_uncached_tokens: int, places: PrefillPlaces | None, max_local_tokens: int | None
) -> bool:
    """Whether a prefill replica should compute a prompt.

    Args:
        num_uncached_tokens: tokens that its decode replica does not cache.
        places: the costs in both places; None if they cannot be compared.
        max_local_tokens: the longest remainder that decode computes, whatever the costs are; None
            lets the costs decide.
    """
    if max_local_tokens is not None:
        return num_uncached_tokens > max_local_tokens
    if num_uncached_tokens <= _MAX_LOCAL_TOKENS:
        return False
    return places is None or places.remote_s < places.local_s
