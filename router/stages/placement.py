"""`Placement`: gathers the facts about replicas, and lets the routing policy choose among them."""

from collections.abc import Sequence
from typing import NamedTuple

from baton.common.errors import FailedPreconditionError, Reason, ResourceExhaustedError
from router.fleet.capacity import Capacity
from router.fleet.fleet import RETRY_AFTER_S, Fleet
from router.fleet.replica import Replica, ReplicaT, without_ejected
from router.fleet.tier_replicas import DecodeReplica, PrefillReplica
from router.requests.request import RoutedRequest
from router.routing.cache_index import CacheIndex, CacheMatch
from router.routing.candidate import Prompt, beginning_key
from router.routing.costs import (
    PrefillPlaces,
    compare_places,
    prefill_scores,
    wants_remote_prefill,
)
from router.routing.policy import Choice, RoutingPolicy
from router.routing.sessions import SessionHomes

__all__ = ["Placement", "PromptPlan", "fits", "refusal"]

_FIRST_OUTPUT_TOKENS = 128.0
_RATE = 0.05  # weight of an answer in the mean


class PromptPlan(NamedTuple):
    """How a prompt gets to its decode replica.

    Attributes:
        is_remote: whether a prefill replica should compute it.
        missing_blocks: blocks of it that the decode replica does not cache.
    """

    is_remote: bool
    missing_blocks: int


class Placement:
    """Chooses the replicas of one model's requests.

    Args:
        fleet: the replicas.
        index: what they cache.
        policy: chooses among replicas.
        max_local_prefill_tokens: the longest remainder of a prompt that decode computes; None lets
            the costs decide.
    """

    def __init__(
        self,
        fleet: Fleet,
        index: CacheIndex,
        policy: RoutingPolicy,
        max_local_prefill_tokens: int | None,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._policy = policy
        self._max_local_prefill_tokens = max_local_prefill_tokens
        self._num_output_tokens = _FIRST_OUTPUT_TOKENS
        self._sessions = SessionHomes()

    def pick_decode(
        self, request: RoutedRequest, refused: frozenset[str] = frozenset()
    ) -> DecodeReplica | None:
        """Chooses the replica that should generate; None if there is none.

        Args:
            request: the request.
            refused: ids of replicas that must not be chosen.
        """
        return self._choose_decode(request, self._decode_replicas(request, refused), None)

    def pick_to_start(
        self, request: RoutedRequest, refused: frozenset[str] = frozenset()
    ) -> DecodeReplica | None:
        """Chooses a replica for a request that nothing has been computed of; None if none would
        start it soon. Prompts wait in the router, and not for prefill, so that tenants take turns.

        Args:
            request: the request.
            refused: ids of replicas that must not be chosen.
        """
        prompt = self._prompt(request)  # one look-up for all replicas
        has_handoff = bool(self._fleet.prefill.candidates)
        cached_blocks = prompt.match.kv_blocks if has_handoff else prompt.match.blocks
        num_blocks = request.num_prompt_blocks
        replicas = [
            replica
            for replica in self._decode_replicas(request, refused)
            if replica.may_start(num_blocks - cached_blocks(replica.replica_id))
        ]
        replica = self._choose_decode(request, replicas, prompt)
        if replica is None or self._fleet.may_start_prompts:
            return replica
        return None if self._plan(request, replica, prompt).is_remote else replica

    def may_decode(self, request: RoutedRequest, refused: frozenset[str] = frozenset()) -> bool:
        """Whether a replica would take the request now, into its queue at least."""
        return bool(self._decode_replicas(request, refused))

    def may_need_prefill(self, request: RoutedRequest) -> bool:
        """Whether the prompt is so long that a prefill replica might compute it."""
        return request.num_prompt_tokens > (self._max_local_prefill_tokens or request.block_size)

    def _choose_decode(
        self, request: RoutedRequest, replicas: Sequence[DecodeReplica], prompt: Prompt | None
    ) -> DecodeReplica | None:
        if not replicas:
            return None
        candidates = [replica.candidate() for replica in replicas]
        choice = self._policy.pick_decode(candidates, prompt or self._prompt(request))
        return _take(choice, replicas, request)

    def pick_prefill(
        self, request: RoutedRequest, tried: frozenset[str] = frozenset()
    ) -> PrefillReplica | None:
        """Chooses the replica that should compute the prompt; None if there is none.

        Args:
            request: the request.
            tried: ids of replicas that must not be chosen.
        """
        replicas = self._prefill_replicas(request, tried)
        if not replicas:
            return None
        candidates = [replica.candidate() for replica in replicas]
        choice = self._policy.pick_prefill(candidates, self._prompt(request))
        return _take(choice, replicas, request)

    def plan_prompt(self, request: RoutedRequest, decode: DecodeReplica) -> PromptPlan:
        """Decides which tier computes a prompt.

        Args:
            request: the request.
            decode: the replica that will generate.
        """
        return self._plan(request, decode, self._prompt(request))

    def _plan(self, request: RoutedRequest, decode: DecodeReplica, prompt: Prompt) -> PromptPlan:
        cached_blocks = prompt.match.blocks(decode.replica_id)
        uncached_tokens = prompt.num_tokens - request.num_reused_tokens(cached_blocks)
        max_local_tokens = self._max_local_prefill_tokens
        places = self._compare(request, decode, prompt) if max_local_tokens is None else None
        request.record.places = places
        is_remote = wants_remote_prefill(max(uncached_tokens, 1), places, max_local_tokens)
        held_blocks = prompt.match.kv_blocks(decode.replica_id) if is_remote else cached_blocks
        return PromptPlan(is_remote, request.num_prompt_blocks - held_blocks)

    def missing_blocks(self, request: RoutedRequest, replica: Replica, *, has_handoff: bool) -> int:
        """Blocks of the prompt that a replica cannot use from its cache.

        Args:
            request: the request.
            replica: the replica.
            has_handoff: whether a handoff brings the prompt's KV, with the states at its end.
        """
        match = request.match(self._index)
        blocks = match.kv_blocks if has_handoff else match.blocks
        return request.num_prompt_blocks - blocks(replica.replica_id)

    def expect(self, request: RoutedRequest, replica: Replica) -> None:
        """Notes that a request was sent to a replica, which will cache its prompt."""
        self._sessions.note(request.record.session, replica.tier_name, replica.replica_id)
        self._index.expect(replica.replica_id, request.block_keys)
        # They would take memory for as long as the answer streams.
        request.last_match.match = request.last_prompt = None

    def note_answer(self, num_tokens: int) -> None:
        """Notes how many tokens a request has generated; those without any do not count."""
        if num_tokens:
            self._num_output_tokens += _RATE * (num_tokens - self._num_output_tokens)

    def _prompt(self, request: RoutedRequest) -> Prompt:
        """What replicas are compared for, made once for each look-up of the prompt."""
        match, prompt = request.match(self._index), request.last_prompt
        if prompt is None or prompt.match is not match:
            prompt = request.last_prompt = self._make_prompt(request, match)
        return prompt

    def _make_prompt(self, request: RoutedRequest, match: CacheMatch) -> Prompt:
        params = request.spec.params
        return Prompt(
            num_tokens=request.num_prompt_tokens,
            block_size=request.block_size,
            match=match,
            key=_key_of(request),
            homes=self._sessions.homes(request.record.session),
            num_output_tokens=min(params.max_tokens, max(self._num_output_tokens, 1.0)),
            has_prefill_tier=bool(self._fleet.prefill.candidates),
            reuses_kv=params.prompt_logprobs is None,
        )

    def _compare(
        self, request: RoutedRequest, decode: DecodeReplica, prompt: Prompt
    ) -> PrefillPlaces | None:
        """Compares the tiers; None if the speed of a replica is not known."""
        candidates = [each.candidate() for each in self._prefill_replicas(request, frozenset())]
        if not all(candidate.has_speeds for candidate in candidates):
            return None
        best = min(prefill_scores(candidates, prompt), default=None)
        return compare_places(decode.candidate(), prompt, best)

    def _decode_replicas(
        self, request: RoutedRequest, refused: frozenset[str] = frozenset()
    ) -> Sequence[DecodeReplica]:
        spec = request.spec  # its size is worked out once, and not for each replica
        size = spec.max_total_tokens, spec.params.num_candidates
        possible = [
            replica
            for replica in self._fleet.decode.candidates
            if replica.capacity.holds(*size) and replica.replica_id not in refused
        ]
        return [each for each in without_ejected(possible) if each.has_room_for(spec)]

    def _prefill_replicas(
        self, request: RoutedRequest, tried: frozenset[str]
    ) -> Sequence[PrefillReplica]:
        num_tokens = request.num_prompt_tokens
        possible = [
            replica
            for replica in self._fleet.prefill.candidates
            if replica.replica_id not in tried and replica.capacity.holds(num_tokens)
        ]
        return without_ejected(possible)


def fits(capacity: Capacity, request: RoutedRequest) -> bool:
    """Whether a decode replica of this capacity can ever run a request."""
    spec = request.spec
    return capacity.holds(spec.max_total_tokens, spec.params.num_candidates)


def refusal(
    replicas: Sequence[DecodeReplica], request: RoutedRequest, note: str = ""
) -> FailedPreconditionError | ResourceExhaustedError:
    """The error of a request that no ready replica takes.

    Args:
        replicas: the decode replicas that are ready.
        request: the request.
        note: follows the text; how long the request waited.
    """
    if not any(fits(replica.capacity, request) for replica in replicas):
        return FailedPreconditionError(
            f"no decode replica can hold this request{note}", reason=Reason.NO_REPLICA_FITS
        )
    return ResourceExhaustedError(
        f"all decode replicas are full{note}", RETRY_AFTER_S, reason=Reason.REPLICAS_FULL
    )


def _take(
    choice: Choice | None, replicas: Sequence[ReplicaT], request: RoutedRequest
) -> ReplicaT | None:
    """Returns the chosen replica; the request's record keeps the reasons."""
    if choice is None:
        return None
    request.record.choices[choice.tier] = choice
    chosen_id = choice.replica_id
    return next(each for each in replicas if each.replica_id == chosen_id)


def _key_of(request: RoutedRequest) -> bytes:
    """Returns the key of requests of one session, or that begin alike; prompts that are shorter
    than a block have their tokens.
    """
    if request.record.session:
        return request.record.session
    if request.block_keys:
        return beginning_key(request.block_keys, request.block_size)
    return repr(request.spec.prompt_token_ids).encode()
