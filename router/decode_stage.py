"""Steps 6 to 8: tokens from the decode tier, whatever happens to a replica.

A request whose replica is lost goes on elsewhere from the prompt and all
tokens so far, with the same seed, so that no token is lost or repeated. A
replica that refuses a request is passed over.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.errors import AbortedError, ResourceExhaustedError, UnavailableError
from baton.v1 import common_pb2, decode_pb2
from router.decode_connection import ReplicaLostError
from router.fleet import Fleet
from router.policy import pick_decode
from router.prefill_stage import HeldHandoff
from router.prefix_index import PrefixIndex
from router.replica import DecodeReplica
from router.request import RoutedRequest
from router.worker_messages import remaining_s, start_decode
from rpc.errors import from_worker_error

__all__ = ["DecodeStage"]

_LOGGER = logging.getLogger("baton.router")
_MAX_LOSSES = 4
"""A request that outlives this many replicas is more likely to be what kills them."""


class DecodeStage:
    """Runs requests on the decode tier.

    Args:
        fleet: the replicas.
        prefix_index: what they probably cache.
        resume_timeout_s: how long a request whose replica was lost waits for
            another one to appear.
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
        output_token_ids: list[int],
        handoff: HeldHandoff | None,
    ) -> AsyncGenerator[decode_pb2.DecodeOutput, None]:
        """Yields outputs until one has a finish reason.

        Args:
            request: the request.
            replica: the first one to try.
            output_token_ids: tokens generated so far; grows with each output.
            handoff: where the prompt's KV is; released once it is loaded.

        Raises:
            UnavailableError: the replica was lost and no other appeared in time.
            AbortedError: too many replicas were lost under this request.
            BatonError: what a replica says of this request.
        """
        refused: frozenset[str] = frozenset()
        num_losses = attempt = 0
        while True:
            outputs = self._attempt(request, attempt, replica, output_token_ids, handoff)
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        yield output
                return
            except ReplicaLostError as error:
                num_losses += 1
                _check_losses(request, num_losses, error)
                replica = await self._next_replica(request, refused)
            except (UnavailableError, ResourceExhaustedError):
                refused |= {replica.replica_id}
                other = self.pick(request, refused)
                if other is None:
                    raise
                replica = other
            attempt += 1

    async def _attempt(
        self,
        request: RoutedRequest,
        attempt: int,
        replica: DecodeReplica,
        output_token_ids: list[int],
        handoff: HeldHandoff | None,
    ) -> AsyncGenerator[decode_pb2.DecodeOutput, None]:
        """One replica's outputs; ends with the request or raises."""
        message = handoff.message if handoff else None
        start = start_decode(request, attempt, output_token_ids, message)
        missing_blocks = request.num_prompt_blocks - self.overlap_blocks(request, replica)
        self._prefix_index.record(replica.replica_id, request.block_keys)
        with replica.reserve(num_blocks=missing_blocks):
            stream = replica.start(start)
            try:
                while True:
                    output = await stream.read()
                    if output.finish_reason == common_pb2.FINISH_REASON_ERROR:
                        raise from_worker_error(output.error)
                    if handoff:
                        handoff.release()
                    output_token_ids.extend(output.token_ids)
                    yield output
                    if output.finish_reason:
                        return
            finally:
                stream.close()

    async def _next_replica(self, request: RoutedRequest, refused: frozenset[str]) -> DecodeReplica:
        """Another replica for a request that lost its own; waits for one to appear.

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
                f"the decode replica of request {request.request_id} was lost, "
                "and no other can go on with it"
            ) from None


def _fits(replica: DecodeReplica, request: RoutedRequest) -> bool:
    limit = min(replica.info.max_model_len, replica.pool_tokens)
    return request.max_total_tokens <= limit


def _check_losses(request: RoutedRequest, num_losses: int, error: ReplicaLostError) -> None:
    _LOGGER.warning("request_id=%s: %s", ascii(request.request_id), error.message)
    if num_losses >= _MAX_LOSSES:
        raise AbortedError(
            f"{num_losses} decode replicas were lost while request {request.request_id} ran"
        )
