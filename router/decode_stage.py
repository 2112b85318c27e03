"""Steps 6 to 8: tokens from the decode tier, whatever happens to a replica.

A request whose replica is lost goes on elsewhere from the prompt and all
tokens so far (`router.progress`), with the same seed, so that no token is lost
or repeated. A
replica that refuses a request is passed over, and so is, once, one that fails
on it. A request that has tokens already waits for a replica that takes it.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.errors import (
    AbortedError,
    BatonError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.v1 import decode_pb2
from router.decode_connection import DecodeStream, ReplicaLostError
from router.fleet import Fleet
from router.held_handoff import HeldHandoff
from router.policy import pick_decode
from router.prefix_index import PrefixIndex
from router.progress import Progress
from router.replica import DecodeReplica
from router.request import RoutedRequest
from router.worker_messages import log_start, remaining_s, start_decode
from rpc.errors import from_worker_error

__all__ = ["DecodeStage"]

_LOGGER = logging.getLogger("baton.router")
_REPLICA_ERRORS = (InternalError, ResourceExhaustedError, UnavailableError)
_MAX_LOSSES = 4
"""A request that outlives this many replicas is more likely to be what kills them."""


class DecodeStage:
    """Runs requests on the decode tier.

    Args:
        fleet: the replicas.
        prefix_index: what they probably cache.
        resume_timeout_s: how long a request whose replica was lost, or that
            none takes after it has got tokens, waits for another one to appear.
    """

    def __init__(self, fleet: Fleet, prefix_index: PrefixIndex, resume_timeout_s: float) -> None:
        self._fleet = fleet
        self._prefix_index = prefix_index
        self._resume_timeout_s = resume_timeout_s

    def pick(
        self, request: RoutedRequest, refused: frozenset[str] = frozenset()
    ) -> DecodeReplica | None:
        """The replica that should generate; None if there is none.

        Args:
            request: the request.
            refused: ids of replicas that would not take it.
        """
        replicas = {
            replica.replica_id: replica
            for replica in self._fleet.decode.candidates
            if replica.replica_id not in refused and _fits(replica, request)
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
    ) -> AsyncGenerator[decode_pb2.DecodeOutput, None]:
        """Yields outputs up to the request's last.

        Args:
            request: the request.
            replica: the first one to try.
            progress: tokens generated so far; grows with each output. The caller
                ends candidates in it that it wants no more of.
            handoff: where the prompt's KV is, if prefill has it; released once it is loaded.

        Raises:
            UnavailableError: the replica was lost and no other appeared in time.
            AbortedError: too many replicas were lost under this request.
            BatonError: what a replica says of this request.
        """
        setbacks = _Setbacks(request.request_id)
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
                if other is None and not _may_wait(request, error, progress):
                    raise
                replica = other or await self._next_replica(request, setbacks.refused)

    async def _attempt(
        self,
        request: RoutedRequest,
        attempt: int,
        replica: DecodeReplica,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> AsyncGenerator[decode_pb2.DecodeOutput, None]:
        """One replica's outputs; ends with the request or raises."""
        start = start_decode(request, attempt, progress, handoff.message)
        missing_blocks = request.num_prompt_blocks - self.overlap_blocks(request, replica)
        with replica.reserve(num_blocks=missing_blocks):
            stream = replica.start(start)
            log_start(request, start.request.request_id, replica)
            # Only now: what is recorded of a worker that was lost would never be forgotten.
            self._prefix_index.record(replica.replica_id, request.block_keys)
            try:
                async for output in _outputs_of(stream):
                    handoff.release()
                    progress.add(output)
                    try:
                        yield output
                    finally:  # where it was the last one that ran, too
                        if progress.has_ended(output.index) and not output.finish_reason:
                            stream.finish(output.index)  # the caller wants no more of it
            finally:
                stream.close()

    async def _next_replica(self, request: RoutedRequest, refused: frozenset[str]) -> DecodeReplica:
        """Waits for another replica, for a request that none of the present ones takes.

        Raises:
            UnavailableError: none did.
        """
        try:
            async with asyncio.timeout(min(self._resume_timeout_s, remaining_s(request))):
                while (replica := self.pick(request, refused)) is None:
                    await self._fleet.wait_for_change()
                return replica
        except TimeoutError:
            raise UnavailableError(
                f"the decode replica of request {request.request_id} was lost or refused it, "
                "and no other can go on with it"
            ) from None


def _fits(replica: DecodeReplica, request: RoutedRequest) -> bool:
    info = replica.info
    return (
        request.max_total_tokens <= min(info.max_model_len, info.max_pool_tokens)
        and request.params.num_candidates <= info.max_num_seqs
    )


async def _outputs_of(stream: DecodeStream) -> AsyncGenerator[decode_pb2.DecodeOutput, None]:
    """Yields outputs up to the last; tokens that came with an error before it is raised."""
    while True:
        output = await stream.read()
        error = from_worker_error(output.error) if output.HasField("error") else None
        is_last = output.is_last
        if error is not None:
            for field in ("finish_reason", "is_last", "error"):
                output.ClearField(field)
        if output.token_ids or error is None:
            yield output
        if error is not None:
            raise error
        if is_last:
            return


def _may_wait(request: RoutedRequest, error: BatonError, progress: Progress) -> bool:
    """Whether a request may wait for a replica: what has begun should not end for want of one.

    Several candidates may be refused because no pool can ever hold them; that is told at once.
    """
    if isinstance(error, ReplicaLostError):
        return True
    may_never_fit = isinstance(error, ResourceExhaustedError) and request.params.num_candidates > 1
    return progress.has_begun and not may_never_fit and not isinstance(error, InternalError)


class _Setbacks:
    """What has gone wrong with one request so far.

    Attributes:
        refused: ids of replicas that are not asked again.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._num_losses = 0
        self._has_failed = False
        self.refused: frozenset[str] = frozenset()

    def add(self, replica: DecodeReplica, error: BatonError, *, was_running: bool) -> None:
        """Notes that a replica would or could not go on.

        Args:
            replica: the replica.
            error: what it said, or that it was lost.
            was_running: whether tokens came from it: then it was lost rather than unwilling.

        Raises:
            AbortedError: too many were lost.
            InternalError: two failed: the request itself is what they fail on.
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
