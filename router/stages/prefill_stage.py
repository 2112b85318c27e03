"""Steps 3 to 5: the prefill tier computes a prompt and hands its KV over.

Decode loads blocks that prefill has saved while the prompt is still computed. The
first tokens do not wait for the last block.

When a replica fails, another one is tried at once, up to three in all. If none computes the
prompt, the fleet's `no_prefill_policy` decides; by default decode computes it. Decode also does so
if a replica fails between the first tokens, which stay valid, and the end of its saves.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.common.errors import InternalError, UnavailableError
from baton.common.reasons import Reason
from baton.common.request.answer import CandidateOutput
from router.fleet.decode_replica import DecodeReplica
from router.fleet.fleet import RETRY_AFTER_S, Fleet
from router.fleet.policy import PrefixIndex, pick_prefill
from router.fleet.prefill_replica import PrefillReplica
from router.fleet.replica import Capacity, without_ejected
from router.fleet.waiting import Turn, waited
from router.requests.request import RoutedRequest
from router.stages.held_handoff import HeldHandoff
from router.stages.prefill_call import REPLICA_ERRORS, PrefillCall, Prompt
from router.stages.progress import Progress

__all__ = ["PrefillStage"]

_MAX_ATTEMPTS = 3
_MAX_STALLED = 2
"""A prompt that was on as many replicas when a step of theirs hung is probably the cause."""


class PrefillStage:
    """Runs prompts on the prefill tier.

    Args:
        fleet: the replicas.
        prefix_index: estimates the replicas' prefix caches.
        queue_timeout_s: how long a prompt that no replica computes waits, if the fleet's policy is
            to wait.
    """

    def __init__(self, fleet: Fleet, prefix_index: PrefixIndex, *, queue_timeout_s: float) -> None:
        self._fleet = fleet
        self._prefix_index = prefix_index
        self._queue_timeout_s = queue_timeout_s

    async def run(
        self,
        request: RoutedRequest,
        decode: DecodeReplica,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> AsyncGenerator[CandidateOutput, None]:
        """Computes the prompt if a replica can. Yields its first tokens once they are drawn, and
        an output with timings once its KV is saved.

        Args:
            request: the request.
            decode: begins to load blocks as they are saved.
            progress: gets the first tokens, which decode continues from.
            handoff: gets the location of the KV.

        Raises:
            UnavailableError: no replica computed the prompt, and the policy keeps it from decode.
            InternalError: steps of two replicas hung with the prompt.
            BatonError: the request is bad, was aborted, or its deadline passed.
        """
        prompt = Prompt(request, decode, progress, handoff)
        for _ in range(_MAX_ATTEMPTS):
            if progress.has_begun:
                return
            replica = await self._find(prompt)
            if replica is None:
                break
            if replica.replica_id == decode.replica_id:
                return  # a worker of both tiers, which computes the prompt where it decodes
            try:
                async with aclosing(self._call(prompt, replica).outputs()) as outputs:
                    async for output in outputs:
                        yield output
                return
            except REPLICA_ERRORS as error:
                if prompt.num_stalled >= _MAX_STALLED:
                    raise InternalError("steps with this prompt did not end") from error
        if self._fleet.no_prefill_policy != "local" and not progress.has_begun:
            raise self._refusal(len(prompt.tried))

    async def _find(self, prompt: Prompt) -> PrefillReplica | None:
        """Returns a replica that was not tried yet; waits for one if the policy says so."""
        if self._fleet.no_prefill_policy != "wait":
            return self._pick(prompt)
        request = prompt.request
        timeout_s = request.record.queue_left_s(self._queue_timeout_s)
        with request.record.waiting():
            return await self._fleet.waiting.wait(
                lambda: self._pick(prompt),
                Turn.of(request.spec),
                timeout_s,
                lambda: ("prefill", frozenset(prompt.tried), self._fitting(request)),
            )

    def _fitting(self, request: RoutedRequest) -> frozenset[Capacity]:
        """The capacities in which a prompt fits."""
        capacities = self._fleet.prefill.capacities
        return frozenset(each for each in capacities if each.holds(request.num_prompt_tokens))

    def _refusal(self, num_tried: int) -> UnavailableError:
        policy = self._fleet.no_prefill_policy
        bound = f"; {waited(self._queue_timeout_s)}" if policy == "wait" else ""
        tried = f", {num_tried} failed" if num_tried else ""
        return UnavailableError(
            f"no prefill replica computes this prompt{tried}{bound} (--no-prefill-policy {policy})",
            RETRY_AFTER_S,
            reason=Reason.NO_REPLICA_READY,
        )

    def _pick(self, prompt: Prompt) -> PrefillReplica | None:
        """Chooses a replica that was not tried yet."""
        request, num_tokens = prompt.request, prompt.request.num_prompt_tokens
        possible = [
            replica
            for replica in self._fleet.prefill.candidates
            if replica.replica_id not in prompt.tried and replica.capacity.holds(num_tokens)
        ]
        replicas = {replica.replica_id: replica for replica in without_ejected(possible)}
        states = [
            replica.state(self._prefix_index.overlap(replica_id, request.block_keys))
            for replica_id, replica in replicas.items()
        ]
        chosen = pick_prefill(states, num_tokens, request.block_size)
        return replicas[chosen] if chosen is not None else None

    def _call(self, prompt: Prompt, replica: PrefillReplica) -> PrefillCall:
        request = prompt.request
        cached_blocks = self._prefix_index.overlap(replica.replica_id, request.block_keys)
        uncached_tokens = request.num_prompt_tokens - request.num_reused_tokens(cached_blocks)
        self._prefix_index.record(replica.replica_id, request.block_keys, replica.num_blocks)
        return PrefillCall(prompt, replica, uncached_tokens)
