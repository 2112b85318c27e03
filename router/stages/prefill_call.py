"""`PrefillCall`: one prompt on one prefill replica."""

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
from baton.v1 import prefill_pb2, request_pb2
from router.fleet.decode_replica import DecodeReplica
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
        is_hedged: whether two replicas have computed it at the same time.
    """

    request: RoutedRequest
    decode: DecodeReplica
    progress: Progress
    handoff: HeldHandoff
    tried: set[str] = field(default_factory=set)
    num_stalled: int = 0
    is_hedged: bool = False


class PrefillCall:
    """A prompt on one replica, from its reservation there to the end of its saves.

    The replica's place is reserved at once. `answer` waits for the first tokens, then `outputs`
    yields them and the rest; or `withdraw` ends the call.

    Args:
        prompt: the prompt.
        replica: computes it.
        num_tokens: how many of its tokens the replica has to compute.
        is_hedge: whether another replica computes the prompt already. Saved blocks go to decode
            only once this call has answered, as decode loads from one replica at a time.
    """

    def __init__(
        self, prompt: Prompt, replica: PrefillReplica, num_tokens: int, *, is_hedge: bool = False
    ) -> None:
        self._prompt = prompt
        self._replica = replica
        self._number = len(prompt.tried)
        self._request_id = prompt.request.spec.for_attempt(self._number).request_id
        prompt.tried.add(replica.replica_id)
        self._is_hedge = is_hedge
        self._unsent: list[prefill_pb2.KvHandoff] = []
        self._answer: prefill_pb2.PrefillResponse | None = None
        self._own: Attempt
        self._queued = ExitStack()
        self._queued.enter_context(replica.reserve(num_tokens=num_tokens))
        self._events = self._run()

    async def answer(self) -> None:
        """Waits for the first tokens. Blocks that are saved until then go to decode.

        Raises:
            BatonError: the replica failed, or was lost.
        """
        async for event in self._events:
            if event.WhichOneof("event") != "saved":
                self._answer = event
                return
            self._add_saved(event.saved)

    async def outputs(self) -> AsyncGenerator[request_pb2.CandidateOutput, None]:
        """Yields the first tokens, then an output with timings once the KV is saved. The caller
        closes the generator, which cancels the call.

        Raises:
            BatonError: the replica failed, or was lost.
        """
        try:
            self._send_saved()
            for output in self._outputs_of(self._answer) if self._answer else ():
                yield output
            async for event in self._events:
                for output in self._outputs_of(event):
                    yield output
        finally:
            await self._close()

    async def withdraw(self) -> None:
        """Cancels the call and makes the replica drop the KV; `answer` must not be running."""
        try:
            await self._close()
        finally:
            self._prompt.handoff.forget(self._replica)
            self._replica.release_request(self._request_id)

    async def _close(self) -> None:
        await self._events.aclose()
        self._queued.close()

    async def _run(self) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        request, replica = self._prompt.request, self._replica
        with self._queued, replica.attempt(request.record, is_hedge=self._is_hedge) as self._own:
            spec = request.spec.for_attempt(self._number, self._own.traceparent)
            replica.log_start(spec)
            try:
                async with aclosing(replica.prefill(spec, request.namespace)) as events:
                    async for event in events:
                        _check(event)
                        yield event
            except REPLICA_ERRORS as error:
                self._prompt.num_stalled += replica.load.stalled
                self._log_failure(error)
                raise

    def _outputs_of(
        self, event: prefill_pb2.PrefillResponse
    ) -> Sequence[request_pb2.CandidateOutput]:
        """Applies an event; returns its outputs for the client."""
        outputs: Sequence[request_pb2.CandidateOutput] = []
        match event.WhichOneof("event"):
            case "saved":
                self._add_saved(event.saved)
            case "result":
                self._prompt.progress.add_prefilled(event.result)
                outputs = event.result.outputs
            case "end":
                if event.end.HasField("handoff"):
                    self._prompt.handoff.complete(event.end.handoff, self._replica)
                elif event.end.output.timings.transfer_ms >= _LONG_TRANSFER_MS:
                    self._prompt.handoff.has_waited_in_vain = True
                outputs = [event.end.output]
        for output in outputs:
            self._queued.close()  # the prompt's tokens are computed
            self._own.take(output)
        return outputs

    def _add_saved(self, saved: prefill_pb2.KvHandoff) -> None:
        self._prompt.handoff.hold(saved, self._replica)
        self._unsent.append(saved)
        if not self._is_hedge or self._answer is not None:
            self._send_saved()

    def _send_saved(self) -> None:
        """Makes decode load the blocks that it does not know of."""
        unsent, self._unsent = self._unsent, []
        for saved in unsent:
            self._prompt.decode.connection.prefetch(self._prompt.request.spec.request_id, saved)

    def _log_failure(self, error: BatonError) -> None:
        _LOGGER.warning(
            "prefill failed request_id=%s replica=%s: %s",
            ascii(self._prompt.request.spec.client_id),
            self._replica.address,
            error.message,
        )


def _check(event: prefill_pb2.PrefillResponse) -> None:
    """Refuses an event that is not allowed.

    Raises:
        InternalError: the replica sent a result without outputs.
    """
    if event.WhichOneof("event") == "result" and not event.result.outputs:
        raise InternalError("the prefill replica sent a result without outputs")
