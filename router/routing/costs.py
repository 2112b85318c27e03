"""What a request costs on a replica, in seconds. Pure.

Engines measure how fast they are, so no weights have to be tuned, and a replica that is half as
fast counts for half.

On the prefill tier a prompt costs the time until its first token can be drawn: the queue of the
replica, then its uncached tokens. Tokens that a shared store holds are loaded if that is quicker
than computing them. On the decode tier it costs the time to bring its KV there, and the time that
its tokens take beside the sequences that run there already.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from router.routing.candidate import Candidate, Fullness, Prompt

__all__ = [
    "Cost",
    "PrefillPlaces",
    "Score",
    "best_of",
    "compare_places",
    "decode_cost",
    "decode_scores",
    "prefill_cost",
    "prefill_scores",
    "wants_remote_prefill",
]

_HANDOFF_S = 0.004
"""What a remote prefill takes besides its work and the bytes: calls, look-ups, waits for steps."""
_EQUAL = 1.05
"""Costs up to this multiple of the least one are as good: measurements vary by more."""
_MAX_LOCAL_TOKENS = 16
"""So few tokens are always computed by decode: they fit into a step of its sequences."""
_NO_BLOCKS: Mapping[str, int] = MappingProxyType({})
"""The blocks of a prompt that reuses nothing."""


class Score(NamedTuple):
    """What replicas are compared by: a few numbers, as there may be hundreds of replicas. `Cost`
    has the details. Scores are sorted from the best to the worst; their ids differ.

    Attributes:
        lacks_room: whether the request would wait for blocks of the pool.
        seconds: what the request costs, over the replica's weight.
        replica_id: the replica; breaks ties.
        fullness: the candidate's.
        backlog_s: the part of the seconds that has nothing to do with the request's KV: the queue,
            or on decode the sequences there.
        cached_tokens: leading tokens of the prompt that the replica caches.
        candidate: the replica's facts.
    """

    lacks_room: bool
    seconds: float
    replica_id: str
    fullness: Fullness
    backlog_s: float
    cached_tokens: int
    candidate: Candidate

    @property
    def work_s(self) -> float:
        """Seconds to compute and to load what the replica lacks of the prompt."""
        return self.seconds - self.backlog_s


class Cost(NamedTuple):
    """The cost of one request on one replica, part by part.

    Attributes:
        replica_id: the replica.
        address: its `host:port`.
        seconds: what replicas are compared by: the parts below, over the replica's weight.
        backlog_s: the part of it that has nothing to do with the request's KV: the queue, or on
            decode the sequences there.
        cached_tokens: leading tokens of the prompt that the replica caches.
        uncached_tokens: tokens that it would compute, or on decode have to get.
        compute_s: seconds to compute them.
        load_s: seconds to load those that are loaded.
        queue_s: seconds of prompt work before them.
        decode_s: seconds in which the request's tokens are generated; 0 on prefill.
        lacks_room: whether the request would wait for blocks of the pool.
        num_requests: requests that are there.
        weight: the replica's share of the load, which divides the seconds.
    """

    replica_id: str
    address: str
    seconds: float
    backlog_s: float
    cached_tokens: int
    uncached_tokens: int
    compute_s: float
    load_s: float
    queue_s: float
    decode_s: float
    lacks_room: bool
    num_requests: int
    weight: float


_blocks_order = itemgetter(3, 1, 2)


def best_of(scores: Sequence[Score], home: str = "") -> Score:
    """Returns the best of one or more scores.

    Seconds are measured, so a small difference says nothing. Of nearly equal ones that of the
    session's home is the best, then that with the most free blocks, then the one that caches
    least, and then, once all caches are full, the one that has computed the fewest tokens of late:
    otherwise the replica that seems the fastest would cache all conversations while the others
    idle.

    Args:
        scores: the scores.
        home: the replica that served the last turn of the request's session; empty if none is
            known.
    """
    lacks_room, least_s = min(scores)[:2]
    max_s = _EQUAL * least_s
    equals = [s for s in scores if s[1] <= max_s and s[0] == lacks_room]  # half the time of names
    if home:
        at_home = next((score for score in equals if score.replica_id == home), None)
        if at_home is not None:
            return at_home
    return min(equals, key=_blocks_order)


def prefill_scores(candidates: Iterable[Candidate], prompt: Prompt) -> list[Score]:
    """Returns what computing a prompt costs on each of some replicas."""
    scores, new = [], tuple.__new__  # in a third of the time of a call of `Score`
    num_tokens, block_size, cached_blocks = prompt.num_tokens, prompt.block_size, _reused(prompt)
    for candidate in candidates:
        id_, queue_s, token_s, fullness = candidate.prefill_facts
        cached_tokens = cached_blocks.get(id_, 0) * block_size
        uncached_tokens = num_tokens - cached_tokens
        if uncached_tokens <= 0:
            cached_tokens, uncached_tokens = num_tokens, 1
        if candidate.store_ids:
            uncached_tokens, load_s = _split(candidate, prompt, cached_tokens)
            seconds = queue_s + uncached_tokens * token_s + load_s / candidate.weight
        else:
            seconds = queue_s + uncached_tokens * token_s
        parts = False, seconds, id_, fullness, queue_s, cached_tokens, candidate
        scores.append(new(Score, parts))
    return scores


def decode_scores(candidates: Iterable[Candidate], prompt: Prompt) -> list[Score]:
    """Returns what generating costs on each of some replicas. If no prefill replica computes the
    prompt, its computation is a part of it.
    """
    scores, new = [], tuple.__new__  # in a third of the time of a call of `Score`
    num_tokens, block_size = prompt.num_tokens, prompt.block_size
    num_output_tokens, has_prefill_tier = prompt.num_output_tokens, prompt.has_prefill_tier
    cached_blocks = _held(prompt) if has_prefill_tier else _reused(prompt)
    for candidate in candidates:
        id_, next_s, token_s, num_free_blocks, fullness = candidate.decode_facts
        cached_tokens = cached_blocks.get(id_, 0) * block_size
        missing_tokens = num_tokens - cached_tokens
        if missing_tokens <= 0:
            cached_tokens, missing_tokens = num_tokens, 1
        backlog_s = num_output_tokens * next_s
        if has_prefill_tier:
            seconds = backlog_s + missing_tokens * token_s
        else:
            work_s, queue_s = _local_work(candidate, prompt, cached_tokens)
            backlog_s += queue_s
            seconds = backlog_s + work_s
        lacks_room = -(-missing_tokens // block_size) > num_free_blocks
        parts = lacks_room, seconds, id_, fullness, backlog_s, cached_tokens, candidate
        scores.append(new(Score, parts))
    return scores


def _local_work(candidate: Candidate, prompt: Prompt, cached_tokens: int) -> tuple[float, float]:
    """Returns the seconds of a prompt's work on its decode replica and of the queue there, over the
    weight.
    """
    uncached_tokens, load_s = _split(candidate, prompt, cached_tokens)
    _, queue_s, token_s, _ = candidate.prefill_facts
    return uncached_tokens * token_s + load_s / candidate.weight, queue_s


def _reused(prompt: Prompt) -> Mapping[str, int]:
    """Returns the blocks of a prompt that replicas have cached, by their ids."""
    return prompt.match.blocks_by_replica if prompt.reuses_kv else _NO_BLOCKS


def _held(prompt: Prompt) -> Mapping[str, int]:
    """The same of the blocks that need not be loaded with a handoff. This brings states, too, so
    that a decode replica uses KV that it could not go on from.
    """
    return prompt.match.kv_by_replica if prompt.reuses_kv else _NO_BLOCKS


def _split(candidate: Candidate, prompt: Prompt, cached_tokens: int) -> tuple[int, float]:
    """Returns how many tokens are to be computed, and the seconds to load the others that are not
    cached. At least one token is computed: the next one is drawn from its logits.
    """
    num_tokens = prompt.num_tokens
    uncached_tokens = num_tokens - cached_tokens or 1
    loads = candidate.store_ids and candidate.load_token_s < candidate.prompt_token_s
    if loads and prompt.reuses_kv:
        stored_blocks = prompt.match.stored_blocks(candidate.store_ids)
        stored_tokens = min(stored_blocks * prompt.block_size, num_tokens - 1)
        if (loaded_tokens := stored_tokens - cached_tokens) > 0:
            return uncached_tokens - loaded_tokens, loaded_tokens * candidate.load_token_s
    return uncached_tokens, 0.0


def prefill_cost(score: Score, prompt: Prompt) -> Cost:
    """Returns the parts of what computing a prompt costs."""
    candidate = score.candidate
    uncached_tokens, load_s = _split(candidate, prompt, score.cached_tokens)
    compute_s = uncached_tokens * candidate.prompt_token_s
    return _cost(score, uncached_tokens, compute_s, load_s, candidate.queue_s, 0.0)


def decode_cost(score: Score, prompt: Prompt) -> Cost:
    """Returns the parts of what generating costs."""
    candidate = score.candidate
    decode_s = prompt.num_output_tokens * candidate.next_token_s
    if not prompt.has_prefill_tier:
        uncached_tokens, load_s = _split(candidate, prompt, score.cached_tokens)
        compute_s = uncached_tokens * candidate.prompt_token_s
        return _cost(score, uncached_tokens, compute_s, load_s, candidate.queue_s, decode_s)
    missing_tokens = prompt.num_tokens - score.cached_tokens or 1
    load_s = missing_tokens * candidate.load_token_s
    return _cost(score, missing_tokens, 0.0, load_s, 0.0, decode_s)


def _cost(
    score: Score,
    uncached_tokens: int,
    compute_s: float,
    load_s: float,
    queue_s: float,
    decode_s: float,
) -> Cost:
    candidate = score.candidate
    return Cost(
        score.replica_id,
        candidate.address,
        score.seconds,
        score.backlog_s,
        score.cached_tokens,
        uncached_tokens,
        compute_s,
        load_s,
        queue_s,
        decode_s,
        score.lacks_room,
        candidate.num_requests,
        candidate.weight,
    )


class PrefillPlaces(NamedTuple):
    """What a prompt costs where it can be computed.

    Attributes:
        local_s: seconds that all requests together lose if decode computes it.
        remote_s: the same if a prefill replica does.
    """

    local_s: float
    remote_s: float


def compare_places(
    decode: Candidate, prompt: Prompt, prefill: Score | None
) -> PrefillPlaces | None:
    """Compares the computation of a prompt by its decode replica and by a prefill replica.

    While decode computes a prompt, each of its sequences waits. If none runs yet, one is counted:
    others will come. A prefill replica delays no sequence that decodes, but the KV has to be moved.

    Args:
        decode: the replica that will generate.
        prompt: the request.
        prefill: the best prefill replica; None if there is none, or if its speed is not known.

    Returns:
        None if there is nothing to compare.
    """
    if prefill is None or not decode.has_speeds:
        return None
    cached_tokens = _reused(prompt).get(decode.replica_id, 0) * prompt.block_size
    cached_tokens = min(cached_tokens, prompt.num_tokens)
    uncached_tokens, load_s = _split(decode, prompt, cached_tokens)
    num_delayed = 1 + max(decode.num_requests, 1)
    local_s = decode.queue_s + load_s + uncached_tokens * decode.prompt_token_s * num_delayed
    held_tokens = _held(prompt).get(decode.replica_id, 0) * prompt.block_size
    move_s = max(prompt.num_tokens - held_tokens, 0) * decode.load_token_s + _HANDOFF_S
    return PrefillPlaces(local_s, prefill.seconds * prefill.candidate.weight + move_s)


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
