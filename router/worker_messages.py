"""What the router sends to workers, and what prefill tells in the form of decode's outputs."""

import asyncio
import logging

from baton.errors import DeadlineExceededError, InternalError
from baton.sampling_wire import sampling_to_proto
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from router.progress import Progress
from router.replica import Replica
from router.request import RoutedRequest

__all__ = [
    "end_of_prefill",
    "first_outputs",
    "log_start",
    "remaining_s",
    "start_decode",
    "worker_request",
]

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
        sampling=sampling_to_proto(params),
        max_tokens=params.max_tokens,
        stop_token_ids=request.stop_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
        kv_form=request.kv_form,
    )


def start_decode(
    request: RoutedRequest,
    attempt: int,
    progress: Progress,
    handoff: prefill_pb2.KvHandoff | None,
) -> decode_pb2.StartDecode:
    """The command that starts a request on a decode replica.

    Raises:
        DeadlineExceededError: no time is left.
    """
    start = decode_pb2.StartDecode(
        request=worker_request(request, attempt),
        handoff=handoff,
        timeout_ms=max(int(remaining_s(request) * 1000), 1),
    )
    progress.write_to(start)
    return start


def first_outputs(
    request: RoutedRequest, result: prefill_pb2.PrefillResult
) -> list[decode_pb2.DecodeOutput]:
    """What prefill drew, in the form of decode's outputs. The first tells of the prompt.

    Ranked candidates that go on send no tokens yet.

    Raises:
        InternalError: nothing was drawn.
    """
    if not (result.candidates or result.token_ids):
        raise InternalError("the prefill replica sent a result without tokens")
    if result.candidates:
        outputs = [
            decode_pb2.DecodeOutput(
                index=candidate.index,
                token_ids=candidate.token_ids,
                finish_reason=candidate.finish_reason,
                score=candidate.score if candidate.HasField("score") else None,
            )
            for candidate in result.candidates
        ]
        outputs[-1].is_last = True
    elif request.params.is_ranked:
        outputs = [decode_pb2.DecodeOutput()]
    else:
        outputs = [
            decode_pb2.DecodeOutput(index=index, token_ids=[token_id])
            for index, token_id in enumerate(result.token_ids)
        ]
    outputs[0].cached_tokens = result.cached_tokens
    outputs[0].timings.CopyFrom(result.timings)
    return outputs


def end_of_prefill(end: prefill_pb2.PrefillEnd) -> decode_pb2.DecodeOutput:
    """What is told when a prompt's KV is saved: when that was, or that the request is over."""
    is_over = end.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
    return decode_pb2.DecodeOutput(
        timings=end.timings, finish_reason=end.finish_reason, is_last=is_over
    )
