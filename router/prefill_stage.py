"""Steps 3 to 5: a prompt computed on the prefill tier, its KV handed over.

Blocks that prefill has saved are loaded on decode while the prompt is still
computed; the first tokens do not wait for the last of them.

Policy when the tier fails: another prefill replica is asked at once, up to
three in all; if none can, decode computes the prompt itself. It does so too if
a replica fails between the first tokens, which stay, and the end of its saves.
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
from baton.v1 import decode_pb2, prefill_pb2
from router.fleet import Fleet
from router.held_handoff import HeldHandoff
from router.policy import pick_prefill
from router.prefix_index import PrefixIndex
from router.progress import Progress
from router.replica import DecodeReplica, PrefillReplica
from router.request import RoutedRequest
from router.worker_messages import (
    end_of_prefill,
    first_outputs,
    log_start,
    remaining_s,
    worker_request,
)

__all__ = ["PrefillStage"]

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


class PrefillStage:
    """Runs prompts on the prefill tier.

    Args:
        fleet: the replicas.
        prefix_index: what they probably cache.
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
    ) -> AsyncGenerator[decode_pb2.DecodeOutput, None]:
        """Computes the prompt if a replica can. Yields its first tokens once they are drawn, and
        what else is to tell of it once its KV is saved.

        Args:
            request: the request.
            decode: told to load what is saved, as it is saved.
            progress: gets the first tokens, if decode is to go on from them.
            handoff: gets where the KV is.

        Raises:
            BatonError: the request is at fault, or its deadline passed.
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
        self, prompt: "_Prompt", attempt: int
    ) -> AsyncGenerator[decode_pb2.DecodeOutput, None]:
        request, replica = prompt.request, prompt.replica
        cached_blocks = self._prefix_index.overlap(replica.replica_id, request.block_keys)
        uncached_tokens = len(request.prompt_token_ids) - cached_blocks * request.block_size
        self._prefix_index.record(replica.replica_id, request.block_keys)
        message = worker_request(request, attempt)
        log_start(request, message.request_id, replica)
        with ExitStack() as queued:
            queued.enter_context(replica.reserve(num_tokens=uncached_tokens))
            async with aclosing(replica.prefill(message, remaining_s(request))) as events:
                async for event in events:
                    for output in prompt.take(event):
                        queued.close()  # its tokens are computed
                        yield output


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt on one prefill replica: its events as outputs, in the form of decode's."""

    request: RoutedRequest
    replica: PrefillReplica
    decode: DecodeReplica
    progress: Progress
    handoff: HeldHandoff

    def take(self, event: prefill_pb2.PrefillResponse) -> Sequence[decode_pb2.DecodeOutput]:
        """The outputs that an event brings."""
        match event.WhichOneof("event"):
            case "saved":
                self.handoff.hold(event.saved, self.replica)
                self.decode.prefetch(self.request.worker_id, event.saved)
            case "result":
                if event.result.token_ids:
                    self.progress.begin(event.result)
                return first_outputs(self.request, event.result)
            case "end":
                if event.end.HasField("handoff"):
                    self.handoff.complete(event.end.handoff, self.replica)
                return [end_of_prefill(event.end)]
        return []


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
