"""Steps 6 to 8: tokens from the decode tier, even if replicas are lost.

A request whose replica is lost continues on another one from the prompt and all
tokens so far (`router.progress`), with the same seed, so that no token is lost or
repeated. A replica that refuses a request, or fails on it, is not tried again; a
second failure ends the request. A request that has tokens already waits for a
replica that takes it.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from baton.errors import (
    AbortedError,
    BatonError,
    FailedPreconditionError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.request_spec import RequestSpec
from baton.spec_wire import spec_to_proto
from baton.v1 import decode_pb2, request_pb2
from router.decode_connection import DecodeStream, ReplicaLostError
from router.fleet import Fleet
from router.held_handoff import HeldHandoff
from router.policy import PrefixIndex, pick_decode
from router.progress import Progress
from router.replica import DecodeReplica
from router.request import RoutedRequest
from router.request_record import Attempt

__all__ = ["DecodeStage"]

_LOGGER = logging.getLogger("baton.router")
_REPLICA_ERRORS = (
    FailedPreconditionError,  # for example, a field that an older worker does not know
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
_MAX_LOSSES = 4
"""A request that loses this many replicas is probably the cause of their deaths."""


class DecodeStage:
    """Runs requests on the decode tier.

    Args:
        fleet: the replicas.
        prefix_index: estimates the replicas' prefix caches.
        resume_timeout_s: how long a request that lost its replica, or that has
            tokens and is refused by all replicas, waits for another one.
    """

    def __init__(self, fleet: Fleet, prefix_index: PrefixIndex, resume_timeout_s: float) -> None:
        self._fleet = fleet
        self._prefix_index = prefix_index
        self._resume_timeout_s = resume_timeout_s

    def pick(
        self, request: RoutedRequest, refused: frozenset[str] = frozenset()
    ) -> DecodeReplica | None:
        """Chooses the replica that should generate; None if there is none.

        Args:
            request: the request.
            refused: ids of replicas that must not be chosen.
        """
        replicas = {
            replica.replica_id: replica
            for replica in self._fleet.decode.candidates
            if replica.replica_id not in refused and _fits(replica, request.spec)
        }
        states = [
            replica.state(self.overlap_blocks(request, replica)) for replica in replicas.values()
        ]
        chosen = pick_decode(states, request.num_prompt_blocks)
        return replicas[chosen] if chosen is not None else None

    def overlap_blocks(self, request: RoutedRequest, replica: DecodeReplica) -> int:
        """Leading blocks of the prompt that the replica probably caches."""
        return self._prefix_index.overlap(replica.replica_id, request.block_keys)

    async def run(
        self,
        request: RoutedRequest,
        replica: DecodeReplica,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> AsyncGenerator[request_pb2.CandidateOutput, None]:
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
            AbortedError: the request lost too many replicas.
            BatonError: a replica answered with this error.
        """
        setbacks = _Setbacks(request.spec.client_id)
        for attempt in itertools.count():
            num_tokens = progress.num_tokens
            outputs = self._attempt(request, attempt, replica, progress, handoff)
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        yield output
                return
            except _REPLICA_ERRORS as error:
                setbacks.add(replica, error, was_running=progress.num_tokens > num_tokens)
                other = self.pick(request, setbacks.refused)
                if other is None and not _may_wait(request.spec, error, progress):
                    raise
                replica = other or await self._next_replica(request, setbacks.refused, error)

    async def _attempt(
        self,
        request: RoutedRequest,
        attempt: int,
        replica: DecodeReplica,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> AsyncGenerator[request_pb2.CandidateOutput, None]:
        """Yields one replica's outputs up to the request's last, or raises its error."""
        with self._stream(request, attempt, replica, progress, handoff) as (own, stream):
            is_last = False
            while not is_last:
                output = await stream.read()
                is_last = output.is_last
                if own.first_output_at is None:
                    own.take(output)
                if is_last or (output.token_ids and not output.finish_reason):
                    # Not on the end of one of several candidates, which may come before the load:
                    # the token from prefill may have ended it.
                    handoff.release()
                progress.add(output)
                try:
                    yield output
                finally:  # also if the caller closes the generator here
                    if progress.has_ended(output.index) and not output.finish_reason:
                        stream.finish(output.index)

    @contextmanager
    def _stream(
        self,
        request: RoutedRequest,
        attempt: int,
        replica: DecodeReplica,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> Iterator[tuple[Attempt, DecodeStream]]:
        """Starts a request on a replica; the context closes the stream."""
        with request.record.attempt("decode", replica.address) as own:
            spec = request.spec.for_attempt(attempt, own.traceparent)
            start = decode_pb2.StartDecode(
                spec=spec_to_proto(spec), namespace=request.namespace, handoff=handoff.message
            )
            progress.write_to(start)
            missing_blocks = request.num_prompt_blocks - self.overlap_blocks(request, replica)
            with replica.reserve(num_blocks=missing_blocks):
                stream = replica.connection.start(start)
                replica.log_start(spec)
                # After `start`, which fails if the worker was lost: a record of a lost worker
                # would never be forgotten.
                self._prefix_index.record(replica.replica_id, request.block_keys)
                try:
                    yield own, stream
                finally:
                    stream.close()

    async def _next_replica(
        self, request: RoutedRequest, refused: frozenset[str], error: BatonError
    ) -> DecodeReplica:
        """Waits until a replica takes a request that none of the present ones takes.

        Args:
            request: the request.
            refused: ids of replicas that must not be chosen.
            error: the last replica's error.

        Raises:
            UnavailableError: no replica took it in time.
            FailedPreconditionError: the same, and the last replica's error says what the
                operator must change.
        """
        try:
            async with asyncio.timeout(min(self._resume_timeout_s, request.spec.remaining_s())):
                while (replica := self.pick(request, refused)) is None:
                    await self._fleet.wait_for_change()
                return replica
        except TimeoutError:
            if isinstance(error, FailedPreconditionError):
                raise error from None
            raise UnavailableError(
                f"the decode replica of request {request.spec.client_id} was lost or refused it, "
                "and no other can continue it"
            ) from None


def _fits(replica: DecodeReplica, spec: RequestSpec) -> bool:
    info = replica.info
    return (
        spec.max_total_tokens <= min(info.max_model_len, info.max_pool_tokens)
        and spec.params.num_candidates <= info.max_num_seqs
    )


def _may_wait(spec: RequestSpec, error: BatonError, progress: Progress) -> bool:
    """Whether a request may wait for another replica: one that has tokens should not fail only
    because no replica is free. Several candidates may never fit any pool; such a request fails
    at once.
    """
    if isinstance(error, ReplicaLostError):
        return True
    may_never_fit = isinstance(error, ResourceExhaustedError) and spec.params.num_candidates > 1
    return progress.has_begun and not may_never_fit and not isinstance(error, InternalError)


class _Setbacks:
    """The losses, refusals and failures of one request so far.

    Attributes:
        refused: ids of replicas that are not tried again.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._num_losses = 0
        self._has_failed = False
        self.refused: frozenset[str] = frozenset()

    def add(self, replica: DecodeReplica, error: BatonError, *, was_running: bool) -> None:
        """Notes that a replica did not finish the request.

        Args:
            replica: the replica.
            error: its error, or `ReplicaLostError`.
            was_running: whether it sent tokens before; its error then counts as a loss,
                not as a refusal.

        Raises:
            AbortedError: the request lost too many replicas.
            InternalError: two replicas failed; the request is probably the cause.
        """
        if not isinstance(error, ReplicaLostError):  # a lost one may connect again
            self.refused |= {replica.replica_id}
        if isinstance(error, InternalError):
            self._note_failure(error)
        elif isinstance(error, ReplicaLostError) or was_running:
            self._note_loss(error)

    def _note_failure(self, error: InternalError) -> None:
        if self._has_failed:
            raise error
        self._has_failed = True

    def _note_loss(self, error: BatonError) -> None:
        _LOGGER.warning("request_id=%s: %s", ascii(self._request_id), error.message)
        self._num_losses += 1
        if self._num_losses >= _MAX_LOSSES:
            raise AbortedError(
                f"{self._num_losses} decode replicas were lost while request {self._request_id} ran"
            )
