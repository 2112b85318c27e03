"""What the router sends to workers, made from a `RoutedRequest`."""

import asyncio
import logging
from collections.abc import Sequence

from baton.errors import DeadlineExceededError
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from router.replica import Replica
from router.request import RoutedRequest

__all__ = ["log_start", "remaining_s", "start_decode", "worker_request"]

_LOGGER = logging.getLogger("baton.router")


def remaining_s(request: RoutedRequest) -> float:
    """Seconds until the request's deadline.

    Raises:
        DeadlineExceededError: it has passed.
    """
    remaining = request.deadline - asyncio.get_running_loop().time()
    if remaining <= 0:
        raise DeadlineExceededError(f"request {request.request_id} ran into its deadline")
    return remaining


def log_start(request: RoutedRequest, worker_id: str, replica: Replica) -> None:
    """Tells an operator by which name a worker knows a request."""
    _LOGGER.debug(
        "started request_id=%s worker_request_id=%s replica=%s",
        ascii(request.request_id),
        ascii(worker_id),
        replica.address,
    )


def worker_request(request: RoutedRequest, attempt: int) -> prefill_pb2.WorkerRequest:
    """The request as either tier gets it.

    Args:
        request: the request.
        attempt: 0 at first; a repeat gets an id of its own, since the worker
            that was tried before may not have noticed its end yet.
    """
    params = request.params
    return prefill_pb2.WorkerRequest(
        request_id=f"{request.worker_id}/{attempt}" if attempt else request.worker_id,
        namespace=request.namespace,
        prompt_token_ids=request.prompt_token_ids,
        sampling=common_pb2.SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
        ),
        max_tokens=params.max_tokens,
        stop_token_ids=request.stop_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def start_decode(
    request: RoutedRequest,
    attempt: int,
    output_token_ids: Sequence[int],
    handoff: prefill_pb2.KvHandoff | None,
) -> decode_pb2.StartDecode:
    """The command that starts a request on a decode replica.

    Raises:
        DeadlineExceededError: no time is left.
    """
    return decode_pb2.StartDecode(
        request=worker_request(request, attempt),
        output_token_ids=output_token_ids,
        handoff=handoff,
        timeout_ms=max(int(remaining_s(request) * 1000), 1),
    )
