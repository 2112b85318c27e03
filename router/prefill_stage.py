"""Steps 3 to 5: the prefill tier computes a prompt and hands its KV over.

Decode loads blocks that prefill has saved while the prompt is still computed. The
first tokens do not wait for the last block.

When a replica fails, another one is tried at once, up to three in all; after that
decode computes the prompt itself. Decode also does so if a replica fails between the
first tokens, which stay valid, and the end of its saves.
"""

import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass

from baton.errors import (
    BatonError,
    FailedPreconditionError,
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.v1 import prefill_pb2, request_pb2
from router.fleet import Fleet
from router.held_handoff import HeldHandoff
from router.policy import PrefixIndex, pick_prefill
from router.progress import Progress
from router.replica import DecodeReplica, PrefillReplica
from router.request import RoutedRequest

__all__ = ["PrefillStage"]

_LOGGER = logging.getLogger("baton.router")
_MAX_ATTEMPTS = 3

# Errors that another replica may not have. Other errors (a bad argument, a deadline, an
# operator's abort) would be the same on every replica.
_REPLICA_ERRORS = (
    FailedPreconditionError,
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)


class PrefillStage:
    """Runs prompts on the prefill tier.

    Args:
        fleet: the replicas.
        prefix_index: estimates the replicas' prefix caches.
    """

    def __init__(self, fleet: Fleet, prefix_index: PrefixIndex) -> None:
        self._fleet = fleet
        self._prefix_index = prefix_index

    async def run(
        self,
        request: RoutedRequest,
        decode: DecodeReplica,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> AsyncGenerator[request_pb2.CandidateOutput, None]:
        """Computes the prompt if a replica can. Yields its first tokens once they are drawn, and
        an output with timings once its KV is saved.

        Args:
            request: the request.
            decode: begins to load blocks as they are saved.
            progress: gets the first tokens, which decode continues from.
            handoff: gets the location of the KV.

        Raises:
            BatonError: the request is bad, was aborted, or its deadline passed.
        """
        tried: set[str] = set()
        for attempt in range(_MAX_ATTEMPTS):
            replica = self._pick(request, tried)
            if replica is None or progress.has_begun:
                return
            tried.add(replica.replica_id)
            prompt = _Prompt(request, replica, decode, progress, handoff)
            try:
                async with aclosing(self._attempt(prompt, attempt)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except _REPLICA_ERRORS as error:
                _log_failure(request, replica, error)

    def _pick(self, request: RoutedRequest, tried: Collection[str]) -> PrefillReplica | None:
        num_tokens = request.num_prompt_tokens
        replicas = {
            replica.replica_id: replica
            for replica in self._fleet.prefill.candidates
            if replica.replica_id not in tried and _fits(replica, num_tokens)
        }
        states = [
            replica.state(self._prefix_index.overlap(replica_id, request.block_keys))
            for replica_id, replica in replicas.items()
        ]
        chosen = pick_prefill(states, num_tokens, request.block_size)
        return replicas[chosen] if chosen is not None else None

    async def _attempt(
        self, prompt: "_Prompt", attempt: int
    ) -> AsyncGenerator[request_pb2.CandidateOutput, None]:
        request, replica = prompt.request, prompt.replica
        cached_blocks = self._prefix_index.overlap(replica.replica_id, request.block_keys)
        uncached_tokens = request.num_prompt_tokens - request.num_reused_tokens(cached_blocks)
        self._prefix_index.record(replica.replica_id, request.block_keys)
        with ExitStack() as queued, request.record.attempt("prefill", replica.address) as own:
            spec = request.spec.for_attempt(attempt, own.traceparent)
            replica.log_start(spec)
            queued.enter_context(replica.reserve(num_tokens=uncached_tokens))
            async with aclosing(replica.prefill(spec, request.namespace)) as events:
                async for event in events:
                    for output in prompt.outputs_of(event):
                        queued.close()  # the prompt's tokens are computed
                        own.take(output)
                        yield output


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt on one prefill replica: applies its events and returns their outputs."""

    request: RoutedRequest
    replica: PrefillReplica
    decode: DecodeReplica
    progress: Progress
    handoff: HeldHandoff

    def outputs_of(
        self, event: prefill_pb2.PrefillResponse
    ) -> Sequence[request_pb2.CandidateOutput]:
        """Applies an event; returns its outputs for the client.

        Raises:
            InternalError: the replica sent a result without outputs.
        """
        match event.WhichOneof("event"):
            case "saved":
                self.handoff.hold(event.saved, self.replica)
                self.decode.connection.prefetch(self.request.spec.request_id, event.saved)
            case "result":
                if not event.result.outputs:
                    raise InternalError("the prefill replica sent a result without outputs")
                self.progress.add_prefilled(event.result)
                return event.result.outputs
            case "end":
                if event.end.HasField("handoff"):
                    self.handoff.complete(event.end.handoff, self.replica)
                return [event.end.output]
        return []


def _fits(replica: PrefillReplica, num_tokens: int) -> bool:
    info = replica.info
    return num_tokens < info.max_model_len and num_tokens <= info.max_pool_tokens


def _log_failure(request: RoutedRequest, replica: PrefillReplica, error: BatonError) -> None:
    _LOGGER.warning(
        "prefill failed request_id=%s replica=%s: %s",
        ascii(request.spec.client_id),
        replica.address,
        error.message,
    )
