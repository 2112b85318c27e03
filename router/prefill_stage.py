"""Steps 3 to 5: a prompt computed on the prefill tier, its KV handed over.

Policy when the tier fails: another prefill replica is asked at once, up to
three in all; if none can, decode computes the prompt itself.
"""

import logging
from collections.abc import Collection

from baton.errors import (
    BatonError,
    FailedPreconditionError,
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.v1 import prefill_pb2
from router.fleet import Fleet
from router.policy import pick_prefill
from router.prefix_index import PrefixIndex
from router.replica import PrefillReplica
from router.request import RoutedRequest
from router.worker_messages import log_start, remaining_s, worker_request

__all__ = ["HeldHandoff", "PrefillStage", "Prefilled"]

_LOGGER = logging.getLogger("baton.router")
_MAX_ATTEMPTS = 3

# A replica's own trouble: another replica may do better. What else it answers (a bad argument,
# a deadline, an operator's abort) would be the same anywhere.
_REPLICA_ERRORS = (
    FailedPreconditionError,
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)


class HeldHandoff:
    """A handoff that its prefill replica keeps until released or its lease ends."""

    def __init__(self, message: prefill_pb2.KvHandoff, replica: PrefillReplica) -> None:
        self._message = message
        self._replica = replica
        self._is_released = False

    @property
    def message(self) -> prefill_pb2.KvHandoff | None:
        """What decode needs; None once released, when the partial tail is gone."""
        return None if self._is_released else self._message

    def release(self) -> None:
        """Lets the replica drop it. Idempotent; does not wait."""
        if not self._is_released:
            self._is_released = True
            self._replica.release_handoff(self._message.handoff_id)


class Prefilled:
    """A computed prompt: the replica's answer and, while decode needs it, its handoff."""

    def __init__(self, response: prefill_pb2.PrefillResponse, replica: PrefillReplica) -> None:
        self.response = response
        has_handoff = response.HasField("handoff")
        self.handoff = HeldHandoff(response.handoff, replica) if has_handoff else None


class PrefillStage:
    """Runs prompts on the prefill tier.

    Args:
        fleet: the replicas.
        prefix_index: what they probably cache.
    """

    def __init__(self, fleet: Fleet, prefix_index: PrefixIndex) -> None:
        self._fleet = fleet
        self._prefix_index = prefix_index

    async def run(self, request: RoutedRequest) -> Prefilled | None:
        """Computes the prompt; None if no replica can.

        Raises:
            BatonError: the request is at fault, or its deadline passed.
        """
        tried: set[str] = set()
        for attempt in range(_MAX_ATTEMPTS):
            replica = self._pick(request, tried)
            if replica is None:
                break
            tried.add(replica.replica_id)
            try:
                return await self._attempt(request, replica, attempt)
            except _REPLICA_ERRORS as error:
                _log_failure(request, replica, error)
        return None

    def _pick(self, request: RoutedRequest, tried: Collection[str]) -> PrefillReplica | None:
        num_tokens = len(request.prompt_token_ids)
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
        self, request: RoutedRequest, replica: PrefillReplica, attempt: int
    ) -> Prefilled:
        cached_blocks = self._prefix_index.overlap(replica.replica_id, request.block_keys)
        uncached_tokens = len(request.prompt_token_ids) - cached_blocks * request.block_size
        self._prefix_index.record(replica.replica_id, request.block_keys)
        message = worker_request(request, attempt)
        log_start(request, message.request_id, replica)
        with replica.reserve(num_tokens=uncached_tokens):
            response = await replica.prefill(message, remaining_s(request))
        return Prefilled(response, replica)


def _fits(replica: PrefillReplica, num_tokens: int) -> bool:
    info = replica.info
    return num_tokens < info.max_model_len and num_tokens <= info.max_pool_tokens


def _log_failure(request: RoutedRequest, replica: PrefillReplica, error: BatonError) -> None:
    _LOGGER.warning(
        "prefill failed request_id=%s replica=%s: %s",
        ascii(request.request_id),
        replica.address,
        error.message,
    )
