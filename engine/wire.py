"""Between the engine's plain data and `baton.v1` messages: pure functions.

Both tiers share them. Errors are not here: `rpc.errors` knows their wire form.
"""

import re
from collections.abc import Sequence

from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.sampling_params import SamplingParams
from baton.v1 import common_pb2, prefill_pb2, worker_pb2
from engine.batch import DrawParams
from engine.request import EngineLoad, EngineRequest, FinishReason, RequestOutput, StageTimings
from kvstore.handoff import KvHandoff

__all__ = [
    "check_namespace",
    "client_request_id",
    "engine_request",
    "finish_reason_to_proto",
    "load_to_proto",
    "merge_outputs",
    "timings_to_proto",
]

_ROUTERS_NAME = re.compile(r"(?P<client>.*)/[0-9a-f]{16}(/[0-9]+)?", re.DOTALL)
_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: common_pb2.FINISH_REASON_ABORTED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
    # The generation goes on elsewhere.
    FinishReason.HANDOFF: common_pb2.FINISH_REASON_UNSPECIFIED,
}


def check_namespace(sender: bytes, own: bytes) -> None:
    """Refuses requests of a router whose block keys are rooted elsewhere.

    Raises:
        FailedPreconditionError: names both sides.
    """
    if sender != own:
        raise FailedPreconditionError(
            f"KV namespace: the request has {sender.hex() or 'none'}, this replica {own.hex()}; "
            "model, dtype or block size differ"
        )


def client_request_id(request_id: str) -> str:
    """The client's part of a router's name for a request (see `WorkerRequest.request_id`)."""
    match = _ROUTERS_NAME.fullmatch(request_id)
    return match["client"] if match else request_id


def engine_request(
    request: prefill_pb2.WorkerRequest,
    *,
    deadline: float,
    output_token_ids: Sequence[int] = (),
    handoff: KvHandoff | None = None,
) -> EngineRequest:
    """The engine's form of a request from a router.

    Args:
        request: the message.
        deadline: `time.monotonic()` at which the request must have ended.
        output_token_ids: tokens generated before, elsewhere.
        handoff: where the prompt's KV is.

    Raises:
        InvalidArgumentError: names the field, its value and the limit.
    """
    if not request.request_id:
        raise InvalidArgumentError.for_field("request_id", "", "not empty")
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.prompt_token_ids),
        output_token_ids=tuple(output_token_ids),
        draw=_draw_params(request),
        max_tokens=request.max_tokens,
        stop_token_ids=frozenset(request.stop_token_ids),
        priority=request.priority,
        cache_salt=request.cache_salt,
        handoff=handoff,
        deadline=deadline,
    )


def _draw_params(request: prefill_pb2.WorkerRequest) -> DrawParams:
    """Unset fields take `SamplingParams`' defaults; its limits hold."""
    sampling = request.sampling
    given = {field.name: value for field, value in sampling.ListFields()}
    params = SamplingParams(**given, max_tokens=request.max_tokens)
    if params.seed is None:
        raise InvalidArgumentError("sampling.seed is unset; workers draw none")
    return DrawParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
    )


def merge_outputs(earlier: RequestOutput | None, later: RequestOutput) -> RequestOutput:
    """Two successive outputs of one request as one."""
    if earlier is None:
        return later
    return RequestOutput(
        request_id=later.request_id,
        token_ids=earlier.token_ids + later.token_ids,
        finish_reason=later.finish_reason,
        error=later.error,
        cached_tokens=later.cached_tokens or earlier.cached_tokens,
        timings=later.timings or earlier.timings,
        handoff=later.handoff,
    )


def finish_reason_to_proto(reason: FinishReason | None) -> "common_pb2.FinishReason.ValueType":
    """UNSPECIFIED for a generation that goes on, here or elsewhere."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def timings_to_proto(timings: StageTimings | None) -> common_pb2.Timings | None:
    """An engine's stages; None if there are none to tell."""
    if timings is None:
        return None
    return common_pb2.Timings(
        queue_ms=timings.queue_ms,
        prefill_ms=timings.prefill_ms,
        transfer_ms=timings.transfer_ms,
        load_ms=timings.load_ms,
    )


def load_to_proto(load: EngineLoad) -> worker_pb2.WorkerLoad:
    """An engine's load, as routers watch it."""
    return worker_pb2.WorkerLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_queued_tokens=load.num_queued_tokens,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        draining=load.draining,
    )
