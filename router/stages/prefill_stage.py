"""Steps 3 to 5: the prefill tier computes a prompt and hands its KV over.

Decode loads blocks that prefill has saved while the prompt is still computed. The
first tokens do not wait for the last block.

When a replica fails, another one is tried at once, up to three in all. If none computes the
prompt, the fleet's `no_prefill_policy` decides; by default decode computes it. Decode also does so
if a replica fails between the first tokens, which stay valid, and the end of its saves.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field

from baton.common.errors import (
    BatonError,
    FailedPreconditionError,
    InternalError,
    Reason,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.common.request.answer import CandidateOutput
from baton.v1 import prefill_pb2
from router.fleet.capacity import Capacity
from router.fleet.fleet import RETRY_AFTER_S, Fleet
from router.fleet.output_wire import output_from_proto
from router.fleet.tier_replicas import DecodeReplica, PrefillReplica
from router.fleet.waiting import Turn, waited
from router.observe.request_record import Attempt
from router.requests.request import RoutedRequest
from router.routing.pulls import Pull
from router.stages.continuation import HeldHandoff, Progress
from router.stages.placement import Placement
from router.stages.pulling import PrefixPulls

__all__ = ["PrefillCall", "PrefillStage", "Prompt"]

_LOGGER = logging.getLogger("baton.router")

# Errors that another replica may not have. Other errors (a bad argument, a deadline, an
# operator's abort) would be the same on every replica.
_REPLICA_ERRORS = (
    FailedPreconditionError,
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)

_LONG_TRANSFER_MS = 100.0
"""A save that fails sooner was refused by a store that answers; one that takes longer was not."""
_MAX_ATTEMPTS = 3
_MAX_STALLED = 2
"""A prompt that was on as many replicas when a step of theirs hung is probably the cause."""


@dataclass(slots=True)
class Prompt:
    """The prompt of one request on the prefill tier.

    Attributes:
        request: the request.
        decode: begins to load blocks as they are saved.
        progress: gets the first tokens, which decode continues from.
        handoff: gets the location of the KV.
        tried: ids of the replicas that it was sent to.
        num_stalled: those of which a step hung while they had it.
    """

    request: RoutedRequest
    decode: DecodeReplica
    progress: Progress
    handoff: HeldHandoff
    tried: set[str] = field(default_factory=set)
    num_stalled: int = 0


class PrefillCall:
    """A prompt on one replica, from its reservation there to the end of its saves.

    Args:
        prompt: the prompt.
        replica: computes it.
        num_tokens: how many of its tokens the replica has to compute.
        pulls: asks another replica for the prompt's beginning.
        pull: what to ask for; None to ask no replica.
    """

    def __init__(
        self,
        prompt: Prompt,
        replica: PrefillReplica,
        num_tokens: int,
        pulls: PrefixPulls,
        pull: Pull | None,
    ) -> None:
        self._prompt = prompt
        self._pulls = pulls
        self._pull = pull
        self._pulled = HeldHandoff()
        self._replica = replica
        self._number = len(prompt.tried)
        prompt.tried.add(replica.replica_id)
        self._attempt: Attempt
        self._queued = ExitStack()
        deadline = prompt.request.spec.deadline
        reserved = replica.reserve(num_tokens=num_tokens, is_sent=False, deadline=deadline)
        self._note_sent = self._queued.enter_context(reserved)

    async def outputs(self) -> AsyncGenerator[CandidateOutput, None]:
        """Yields the first tokens, then an output with timings once the KV is saved. The caller
        closes the generator, which cancels the call.

        Raises:
            BatonError: the replica failed, or was lost.
        """
        request, replica = self._prompt.request, self._replica
        with ExitStack() as ends, self._queued, replica.attempt(request.record) as self._attempt:
            spec = request.spec.for_attempt(self._number, self._attempt.traceparent)
            if self._pull is not None:
                self._pulled = await self._pulls.borrow(request, self._pull, self._attempt)
                ends.callback(self._pulled.release)
            replica.log_start(spec)
            try:
                events = replica.prefill(spec, request.namespace, self._pulled.message)
                self._note_sent()  # not before: the other replica may have lent late
                async with aclosing(events):
                    async for event in events:
                        self._pulled.release()  # it is loaded, or was given up
                        for output in self._apply(event):
                            yield output
            except _REPLICA_ERRORS as error:
                self._prompt.num_stalled += replica.load.stalled
                self._log_failure(error)
                raise
            except asyncio.CancelledError:
                if self._attempt.first_output_at is None:
                    # It may have ended meanwhile, with a handoff that is not known here.
                    self._prompt.handoff.forget(replica)
                    replica.release_request(spec.request_id)
                raise

    def _apply(self, event: prefill_pb2.PrefillResponse) -> Sequence[CandidateOutput]:
        """Applies an event; returns its outputs for the client.

        Raises:
            InternalError: the replica sent a result without outputs.
        """
        outputs: Sequence[CandidateOutput] = []
        match event.WhichOneof("event"):
            case "saved":
                self._add_saved(event.saved)
            case "result":
                if not event.result.outputs:
                    raise InternalError("the prefill replica sent a result without outputs")
                outputs = [output_from_proto(output) for output in event.result.outputs]
                self._prompt.progress.add_prefilled(event.result, outputs)
            case "end":
                if event.end.HasField("handoff"):
                    self._prompt.handoff.complete(event.end.handoff, self._replica)
                elif event.end.output.timings.transfer_ms >= _LONG_TRANSFER_MS:
                    self._prompt.handoff.has_waited_in_vain = True
                outputs = [output_from_proto(event.end.output)]
        for output in outputs:
            self._queued.close()  # the prompt's tokens are computed
            self._attempt.take(output)
        return outputs

    def _add_saved(self, saved: prefill_pb2.KvHandoff) -> None:
        """Makes decode load blocks that are saved."""
        self._prompt.handoff.hold(saved, self._replica)
        self._prompt.decode.connection.prefetch(self._prompt.request.spec.request_id, saved)

    def _log_failure(self, error: BatonError) -> None:
        _LOGGER.warning(
            "prefill failed request_id=%s replica=%s: %s",
            ascii(self._prompt.request.spec.client_id),
            self._replica.address,
            error.message,
        )


class PrefillStage:
    """Runs prompts on the prefill tier.

    Args:
        fleet: the replicas.
        placement: chooses the replicas.
        pulls: asks other replicas for the beginning of a prompt.
        queue_timeout_s: how long a prompt that no replica computes waits, if the fleet's policy is
            to wait.
    """

    def __init__(
        self, fleet: Fleet, placement: Placement, pulls: PrefixPulls, *, queue_timeout_s: float
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._pulls = pulls
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
            except _REPLICA_ERRORS as error:
                if prompt.num_stalled >= _MAX_STALLED:
                    raise InternalError("steps with this prompt did not end") from error
        if self._fleet.no_prefill_policy != "local" and not progress.has_begun:
            raise self._refusal(len(prompt.tried))

    async def _find(self, prompt: Prompt) -> PrefillReplica | None:
        """Returns a replica that was not tried yet; waits for one if the policy says so."""
        if self._fleet.no_prefill_policy != "wait":
            return self._pick(prompt)
        request = prompt.request
        with request.record.waiting():
            return await self._fleet.waiting.wait(
                lambda: self._pick(prompt),
                Turn.of(request.spec, request.share),
                self._queue_timeout_s,
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
        return self._placement.pick_prefill(prompt.request, frozenset(prompt.tried))

    def _call(self, prompt: Prompt, replica: PrefillReplica) -> PrefillCall:
        cost = prompt.request.record.choices["prefill"].cost
        pull = self._pulls.plan(prompt.request, replica)
        # What is pulled may also be in a store, whose tokens are not among the uncached ones.
        num_tokens = max(cost.uncached_tokens - (pull.num_tokens if pull is not None else 0), 1)
        self._placement.expect(prompt.request, replica)
        return PrefillCall(prompt, replica, num_tokens, self._pulls, pull)
