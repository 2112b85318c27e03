"""`Candidate` and `Prompt`: the facts that a routing policy compares replicas by. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeAlias

from router.routing.cache_index import CacheMatch

__all__ = ["Candidate", "Fullness", "Prompt", "beginning_key", "with_speeds"]

_DEFAULT_PROMPT_TOKEN_S = 1e-4
_DEFAULT_DECODE_STEP_S = 0.02
"""Speeds that are assumed while no replica has reported any; then only their ratio counts."""
Fullness: TypeAlias = tuple[float, float, float, int]
_KEY_TOKENS = 1024
"""Prompts with as many equal first tokens belong together. With fewer, a system prompt that all
prompts share would make them one."""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A replica at the moment of choosing. Nothing changes it, but each request makes some, and a
    frozen one takes longer to make.

    A block has as many tokens as one block key stands for, whatever the replica's own
    block size is.

    Attributes:
        replica_id: names the replica; breaks ties, so that equal facts lead to equal choices.
        address: its `host:port`.
        num_requests: requests that run, wait or are on their way there, of all routers.
        num_seats: sequences that it runs at once; at least 1.
        num_queued_tokens: prompt tokens that it has still to compute.
        queue_s: seconds in which it computes them.
        num_free_blocks: blocks that no request holds.
        num_blocks: blocks in its pool.
        cached_share: the share of its blocks that are in its prefix cache.
        recent_work: grows with the prompt tokens that it has computed of late; only compared.
        prompt_token_s: seconds in which it computes one more token of a prompt; 0 if that is
            not known.
        decode_step_s: seconds in which each of its sequences decodes once while all seats are
            taken; 0 if that is not known.
        load_token_s: seconds in which it loads the KV of a token that it does not cache.
        store_ids: identities of its KV stores.
        weight: the share of the load that it should get, beside a replica of weight 1.
        used_share: the share of its blocks that requests hold.
        fullness: what nearly equal costs are decided by, the least first: the share of its blocks
            that requests hold, the share that is cached, its recent work, and its requests.
        has_speeds: whether it has reported how fast it is.
        next_token_s: seconds in which one more sequence decodes once beside those that are there.
        prefill_facts: what costs on prefill are made of, as reading many attributes takes long: its
            id, `queue_s` and `prompt_token_s` over the weight, and `fullness`.
        decode_facts: the same for decode: its id, `next_token_s` and `load_token_s` over the
            weight, `num_free_blocks` and `fullness`.
    """

    replica_id: str
    address: str = ""
    num_requests: int = 0
    num_seats: int = 1
    num_queued_tokens: int = 0
    queue_s: float = 0.0
    num_free_blocks: int = 0
    num_blocks: int = 0
    cached_share: float = 0.0
    recent_work: float = -math.inf
    prompt_token_s: float = 0.0
    decode_step_s: float = 0.0
    load_token_s: float = 0.0
    store_ids: tuple[str, ...] = ()
    weight: float = 1.0
    used_share: float = field(init=False)
    fullness: Fullness = field(init=False)
    has_speeds: bool = field(init=False)
    next_token_s: float = field(init=False)
    prefill_facts: tuple[str, float, float, Fullness] = field(init=False)
    decode_facts: tuple[str, float, float, int, Fullness] = field(init=False)

    def __post_init__(self) -> None:
        # Candidates are compared far more often than they change.
        id_, weight, num_free_blocks = self.replica_id, self.weight, self.num_free_blocks
        used_share = 1 - num_free_blocks / self.num_blocks if self.num_blocks else 0.0
        next_token_s = (self.num_requests + 1) / self.num_seats * self.decode_step_s
        fullness = used_share, self.cached_share, self.recent_work, self.num_requests
        token_s, load_s = self.prompt_token_s / weight, self.load_token_s / weight
        self.used_share, self.fullness, self.next_token_s = used_share, fullness, next_token_s
        self.has_speeds = self.prompt_token_s > 0 and self.decode_step_s > 0
        self.prefill_facts = id_, self.queue_s / weight, token_s, fullness
        self.decode_facts = id_, next_token_s / weight, load_s, num_free_blocks, fullness


@dataclass(slots=True, kw_only=True)
class Prompt:
    """A request to be placed. Nothing changes it, as with `Candidate`.

    Attributes:
        num_tokens: tokens of its prompt; at least 1.
        block_size: tokens per block.
        match: the cached blocks of the prompt.
        key: requests with an equal key belong together: those of one session, or with the same
            first blocks.
        homes: by tier, the replica that served the last turn of its session, if one is known.
        num_output_tokens: tokens that it will probably generate.
        has_prefill_tier: whether prefill replicas compute prompts for decode.
        reuses_kv: whether cached KV serves it. A request for log-probabilities of its prompt
            computes all of it.
    """

    num_tokens: int
    block_size: int
    match: CacheMatch
    key: bytes = b""
    homes: Mapping[str, str] = field(default_factory=dict)
    num_output_tokens: float = 1.0
    has_prefill_tier: bool = True
    reuses_kv: bool = True


def beginning_key(block_keys: Sequence[bytes], block_size: int) -> bytes:
    """Returns a key that prompts share which begin with the same 1,024 tokens or so.

    Args:
        block_keys: the chained keys of a prompt's full blocks; at least one.
        block_size: tokens per block.
    """
    return block_keys[: max(_KEY_TOKENS // block_size, 1)][-1]


def with_speeds(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Returns the candidates, where those that have not reported how fast they are, such as older
    workers, are as fast as the others on average.
    """
    if all(candidate.has_speeds for candidate in candidates):
        return candidates
    token_s = _mean([c.prompt_token_s for c in candidates], _DEFAULT_PROMPT_TOKEN_S)
    step_s = _mean([c.decode_step_s for c in candidates], _DEFAULT_DECODE_STEP_S)
    return [_with_speeds(candidate, token_s, step_s) for candidate in candidates]


def _with_speeds(candidate: Candidate, token_s: float, step_s: float) -> Candidate:
    queue_s, token_s = candidate.queue_s, candidate.prompt_token_s or token_s
    if not candidate.prompt_token_s:
        queue_s = candidate.num_queued_tokens * token_s
    return replace(
        candidate,
        prompt_token_s=token_s,
        decode_step_s=candidate.decode_step_s or step_s,
        queue_s=queue_s,
    )


def _mean(values: Sequence[float], default: float) -> float:
    """The mean of the values that are not 0."""
    known = [value for value in values if value]
    return fmean(known) if known else default
