"""`PrefillCall`: one prompt on one prefill replica."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field

from baton.common.errors import (
    BatonError,
    FailedPreconditionError,
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.common.request.answer import CandidateOutput
from baton.v1 import prefill_pb2
from router.fleet.decode_replica import DecodeReplica
from router.fleet.output_wire import output_from_proto
from router.fleet.prefill_replica import PrefillReplica
from router.observe.request_record import Attempt
from router.requests.request import RoutedRequest
from router.stages.held_handoff import HeldHandoff
from router.stages.progress import Progress

__all__ = ["REPLICA_ERRORS", "PrefillCall", "Prompt"]

_LOGGER = logging.getLogger("baton.router")

# Errors that another replica may not have. Other errors (a bad argument, a deadline, an
# operator's abort) would be the same on every replica.
REPLICA_ERRORS = (
    FailedPreconditionError,
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)

_LONG_TRANSFER_MS = 100.0
"""A save that fails sooner was refused by a store that answers; one that takes longer was not."""


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
    """

    def __init__(self, prompt: Prompt, replica: PrefillReplica, num_tokens: int) -> None:
        self._prompt = prompt
        self._replica = replica
        self._number = len(prompt.tried)
        prompt.tried.add(replica.replica_id)
        self._attempt: Attempt
        self._queued = ExitStack()
        self._queued.enter_context(replica.reserve(num_tokens=num_tokens))

    async def outputs(self) -> AsyncGenerator[CandidateOutput, None]:
        """Yields the first tokens, then an output with timings once the KV is saved. The caller
        closes the generator, which cancels the call.

        Raises:
            BatonError: the replica failed, or was lost.
        """
        request, replica = self._prompt.request, self._replica
        with self._queued, replica.attempt(request.record) as self._attempt:
            spec = request.spec.for_attempt(self._number, self._attempt.traceparent)
            replica.log_start(spec)
            try:
                async with aclosing(replica.prefill(spec, request.namespace)) as events:
                    async for event in events:
                        for output in self._apply(event):
                            yield output
            except REPLICA_ERRORS as error:
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
