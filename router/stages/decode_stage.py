"""Steps 6 to 8: tokens from the decode tier, even if replicas are lost.

A request whose replica is lost continues on another one from the prompt and all
tokens so far (`router.stages.continuation`), with the same seed, so that no token is lost or
repeated. A replica that refuses a request, or fails on it, is not tried again, except if
it had no room or took no requests then; a second failure ends the request. A request that
lost its replica, found none with room or has tokens already waits for a replica that takes it.
"""

import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager

from baton.common.errors import (
    BatonError,
    FailedPreconditionError,
    InternalError,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.common.request.answer import CandidateOutput
from baton.common.request.request_spec import RequestSpec
from baton.common.request.spec_wire import spec_to_proto
from baton.v1 import decode_pb2
from router.fleet.capacity import Capacity
from router.fleet.decode_connection import DecodeStream, ReplicaLostError, RequestMovedError
from router.fleet.fleet import RETRY_AFTER_S, Fleet, none_ready
from router.fleet.tier_replicas import DecodeReplica
from router.fleet.waiting import Turn, waited
from router.observe.request_record import Attempt
from router.requests.request import RoutedRequest
from router.stages.continuation import HeldHandoff, Progress, Setbacks
from router.stages.placement import Placement, fits, refusal
from router.stages.pulling import PrefixPulls

__all__ = ["DecodeStage"]

_REPLICA_ERRORS = (
    FailedPreconditionError,  # for example, a field that an older worker does not know
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)


class DecodeStage:
    """Runs requests on the decode tier.

    Args:
        fleet: the replicas.
        placement: chooses the replicas.
        pulls: asks other replicas for the beginning of a prompt that decode computes itself.
        queue_timeout_s: how long a new request waits while no replica takes it, not even into its
            queue. While one would, it waits in the router up to its deadline.
        resume_timeout_s: how long a request that lost its replica, or that has
            tokens and is refused by all replicas, waits for another one.
    """

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        pulls: PrefixPulls,
        *,
        queue_timeout_s: float,
        resume_timeout_s: float,
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._pulls = pulls
        self._queue_timeout_s = queue_timeout_s
        self._resume_timeout_s = resume_timeout_s

    async def find(self, request: RoutedRequest) -> DecodeReplica:
        """Waits for the replica that should generate. Its seat and its room are known to be there,
        or to be there soon, before anything is computed.

        Raises:
            UnavailableError: no replica took the request within the time that it may wait.
            ResourceExhaustedError: the same, as all were full.
        """
        timeout_s = request.record.queue_left_s(self._queue_timeout_s)
        replica = await self._wait(request, frozenset(), timeout_s, is_new=True)
        if replica is None:
            raise self._refusal(request)
        return replica

    async def run(
        self,
        request: RoutedRequest,
        replica: DecodeReplica,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> AsyncGenerator[CandidateOutput, None]:
        """Yields outputs up to the request's last.

        Args:
            request: the request.
            replica: the first replica to try.
            progress: the tokens generated so far; each output is added. The caller
                marks candidates that need no more tokens as ended in it.
            handoff: where the prompt's KV is, if prefill has it; released once it is loaded.

        Raises:
            UnavailableError: the replica was lost, or refused the request, and no other
                appeared in time.
            ResourceExhaustedError: all replicas are full.
            AbortedError: the request lost too many replicas.
            BatonError: a replica answered with this error.
        """
        setbacks = Setbacks(request.spec)
        for attempt in itertools.count():
            num_tokens = progress.num_tokens
            outputs = self._attempt(request, attempt, replica, progress, handoff)
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        yield output
                return
            except _REPLICA_ERRORS as error:
                if isinstance(error, RequestMovedError) and error.handoff is not None:
                    handoff.complete(error.handoff, replica)
                setbacks.add(replica, error, was_running=progress.num_tokens > num_tokens)
                replica = await self._next_replica(request, setbacks, progress, error)

    async def _attempt(
        self,
        request: RoutedRequest,
        attempt: int,
        replica: DecodeReplica,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> AsyncGenerator[CandidateOutput, None]:
        """Yields one replica's outputs up to the request's last, or raises its error."""
        started = self._stream(request, attempt, replica, progress, handoff)
        async with started as (own, stream, pulled):
            is_last = False
            while not is_last:
                if replica.is_leaving and self._may_move(request):
                    stream.move()
                output = await stream.read()
                if output is None:
                    continue
                is_last = output.is_last
                if own.first_output_at is None:
                    own.take(output)
                if is_last or (output.token_ids and not output.finish_reason):
                    # Not on the end of one of several candidates, which may come before the load:
                    # the token from prefill may have ended it.
                    handoff.release()
                    pulled.release()
                progress.add(output)
                runs_on = output.finish_reason is None  # there; the caller may end it by a stop
                try:
                    yield output
                finally:  # also if the caller closes the generator here
                    if runs_on and progress.has_ended(output.index):
                        stream.finish(output.index)

    def _may_move(self, request: RoutedRequest) -> bool:
        """Whether a request should leave a replica that drains: if another one takes it, and it
        loses no tokens thereby. Candidates that are compared have not sent theirs.
        """
        return not request.spec.params.is_ranked and self._placement.may_decode(request)

    @asynccontextmanager
    async def _stream(
        self,
        request: RoutedRequest,
        attempt: int,
        replica: DecodeReplica,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> AsyncIterator[tuple[Attempt, DecodeStream, HeldHandoff]]:
        """Starts a request on a replica; the context closes the stream.

        Yields also the prefix that the replica pulls if it computes the prompt itself.
        """
        is_loaded = handoff.message is not None
        missing_blocks = self._placement.missing_blocks(request, replica, has_handoff=is_loaded)
        with ExitStack() as ends, replica.attempt(request.record) as own:
            spec = request.spec.for_attempt(attempt, own.traceparent)
            reserved = replica.reserve(
                num_blocks=missing_blocks, is_sent=False, deadline=spec.deadline
            )
            seat = ExitStack()  # is free once the replica has ended, if the client reads or not
            note_sent = seat.enter_context(reserved)
            ends.callback(seat.close)
            pulled = HeldHandoff()
            if not is_loaded and (pull := self._pulls.plan(request, replica)) is not None:
                pulled = await self._pulls.borrow(request, pull, own)
                ends.callback(pulled.release)
            command = decode_pb2.ConnectRequest()  # is written in place: no part of it is copied
            start = command.start
            spec_to_proto(spec, start.spec)
            start.namespace = request.namespace
            if handoff.message is not None:
                start.handoff.CopyFrom(handoff.message)
            if pulled.message is not None:
                start.prefix.CopyFrom(pulled.message)
            start.skip_lookup = not is_loaded and handoff.has_waited_in_vain
            progress.write_to(start)
            stream = replica.connection.start(command, seat.close)
            ends.callback(stream.close)
            note_sent()
            replica.log_start(spec)
            # After `start`, which fails if the worker was lost: a record of a lost worker would
            # never be forgotten.
            self._placement.expect(request, replica)
            yield own, stream, pulled

    async def _next_replica(
        self,
        request: RoutedRequest,
        setbacks: Setbacks,
        progress: Progress,
        error: BatonError,
    ) -> DecodeReplica:
        """Returns another replica for a request; waits for one if the request may.

        Args:
            request: the request.
            setbacks: what went wrong with it.
            progress: its tokens.
            error: the last replica's error.

        Raises:
            UnavailableError: no replica took it in time.
            ResourceExhaustedError: the same, as all were full.
            BatonError: the last replica's error, if no other replica helps.
        """
        is_new = not progress.has_begun and not isinstance(error, ReplicaLostError)
        timeout_s = self._queue_timeout_s if is_new else self._resume_timeout_s
        is_full = setbacks.has_found_full(error)
        may_wait = is_full or _may_wait(request.spec, error, progress)
        replica = await self._wait(
            request, setbacks.refused, timeout_s if may_wait else 0.0, is_new=is_new
        )
        if replica is not None:
            return replica
        if error.reason == Reason.NO_REPLICA_FITS:  # not a matter of load: no retry helps
            raise FailedPreconditionError(error.message, reason=error.reason)
        if isinstance(error, FailedPreconditionError) or not may_wait:
            raise error
        if is_new:
            raise self._refusal(request) from error
        raise UnavailableError(
            f"the decode replica of request {request.spec.client_id} was lost or refused it, and "
            f"no other continued it within {self._resume_timeout_s:g} s (--resume-timeout-s)",
            RETRY_AFTER_S,
            reason=Reason.NOT_RESUMED,
        ) from error

    async def _wait(
        self, request: RoutedRequest, refused: frozenset[str], timeout_s: float, *, is_new: bool
    ) -> DecodeReplica | None:
        """Waits until a replica takes a request; returns None after the timeout. The request's own
        deadline cancels the wait, so that the client learns of the right one of the two.
        """
        placement = self._placement
        pick = placement.pick_to_start if is_new else placement.pick_decode
        with request.record.waiting():
            return await self._fleet.waiting.wait(
                lambda: pick(request, refused),
                Turn.of(request.spec, request.share, is_new=is_new),
                timeout_s,
                lambda: ("decode", is_new, refused, self._need(request)),
                lambda: is_new and placement.may_decode(request, refused),
            )

    def _need(self, request: RoutedRequest) -> tuple[frozenset[Capacity], bool, bool]:
        """The capacities in which a request fits, whether it has a grammar, and whether its prompt
        may need prefill. Of two requests with the same needs and the same refusals, each can be
        placed where the other can, unless it needs more room.
        """
        capacities = self._fleet.decode.capacities
        fitting = frozenset(capacity for capacity in capacities if fits(capacity, request))
        has_grammar = request.spec.params.structured_outputs is not None
        return fitting, has_grammar, self._placement.may_need_prefill(request)

    def _refusal(self, request: RoutedRequest) -> BatonError:
        """The error of a new request that has waited in vain."""
        replicas = self._fleet.decode.candidates
        note = f"; {waited(self._queue_timeout_s)}"
        return refusal(replicas, request, note) if replicas else none_ready(note)


def _may_wait(spec: RequestSpec, error: BatonError, progress: Progress) -> bool:
    """Whether a request may wait for another replica: one that has tokens should not fail only
    because no replica is free. Several candidates may never fit any pool; such a request fails
    at once.
    """
    if isinstance(error, UnavailableError):
        return True
    may_never_fit = isinstance(error, ResourceExhaustedError) and spec.params.num_candidates > 1
    return progress.has_begun and not may_never_fit and not isinstance(error, InternalError)
