"""Between the engine's plain data and `baton.v1` messages: pure functions.

Both tiers share them. Errors are not here: `rpc.errors` knows their wire form.

The prefix cache's events as `baton.v1` messages: pure functions.
"""

import re
from collections.abc import Iterator, Sequence

from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.sampling_params import SamplingParams
from baton.sampling_wire import sampling_fields
from baton.v1 import common_pb2, decode_pb2, prefill_pb2, worker_pb2
from engine.batch import DrawParams
from engine.kv_cache.events import BlocksRemoved, BlocksStored, KvEvent
from engine.request import (
    BeamSearchParams,
    CandidateProgress,
    EngineLoad,
    EngineRequest,
    FinishReason,
    RequestOutput,
    StageTimings,
)
from kvstore.handoff import KvHandoff, in_words

__all__ = [
    "add_output",
    "beam_search_params",
    "check_namespace",
    "client_request_id",
    "engine_request",
    "finish_reason_to_proto",
    "kv_event_responses",
    "load_to_proto",
    "merge_outputs",
    "timings_to_proto",
]

_REST = -1  # in place of a candidate's number: those that have not ended
_ROUTERS_NAME = re.compile(r"(?P<client>.*)/[0-9a-f]{16}(/[0-9]+)?", re.DOTALL)
_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: common_pb2.FINISH_REASON_ABORTED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
    FinishReason.IGNORED: common_pb2.FINISH_REASON_IGNORED,
    # The generation goes on elsewhere.
    FinishReason.HANDOFF: common_pb2.FINISH_REASON_UNSPECIFIED,
}


def check_namespace(request: prefill_pb2.WorkerRequest, namespace: bytes, kv_form: str) -> None:
    """Refuses requests of a router whose block keys are rooted elsewhere.

    Args:
        request: the message.
        namespace: this replica's.
        kv_form: what that is a digest of, in words.

    Raises:
        FailedPreconditionError: names both sides.
    """
    if request.namespace != namespace:
        theirs, ours = in_words(request.namespace, request.kv_form), in_words(namespace, kv_form)
        raise FailedPreconditionError(
            f"KV namespace: the request has {theirs}, this replica {ours}"
        )


def client_request_id(request_id: str) -> str:
    """The client's part of a router's name for a request (see `WorkerRequest.request_id`)."""
    match = _ROUTERS_NAME.fullmatch(request_id)
    return match["client"] if match else request_id


def engine_request(
    request: prefill_pb2.WorkerRequest,
    *,
    deadline: float,
    progress: Sequence[decode_pb2.CandidateProgress] = (),
    first_beams: Sequence[decode_pb2.FirstBeam] = (),
    handoff: KvHandoff | None = None,
) -> EngineRequest:
    """The engine's form of a request from a router.

    Args:
        request: the message.
        deadline: `time.monotonic()` at which the request must have ended.
        progress: what unfinished candidates have from elsewhere.
        first_beams: what beams begin with.
        handoff: where the prompt's KV is.

    Raises:
        InvalidArgumentError: names the field, its value and the limit.
    """
    if not request.request_id:
        raise InvalidArgumentError.for_field("request_id", "", "not empty")
    # Unset fields take the defaults of `SamplingParams`; its limits hold.
    params = SamplingParams(**sampling_fields(request.sampling), max_tokens=request.max_tokens)
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.prompt_token_ids),
        draw=_draw_params(params),
        max_tokens=params.max_tokens,
        num_candidates=params.num_candidates,
        num_returned=params.n,
        beam_search=beam_search_params(params),
        progress=tuple(
            CandidateProgress(given.index, tuple(given.output_token_ids), given.logprob)
            for given in progress
        ),
        first_beams=tuple((beam.token_id, beam.logprob) for beam in first_beams),
        stop_token_ids=frozenset(request.stop_token_ids),
        priority=request.priority,
        cache_salt=request.cache_salt,
        handoff=handoff,
        deadline=deadline,
    )


def beam_search_params(params: SamplingParams) -> BeamSearchParams | None:
    """How the engine searches with beams; None where tokens are drawn."""
    if params.beam_width is None:
        return None
    return BeamSearchParams(params.length_penalty, params.early_stopping)


def _draw_params(params: SamplingParams) -> DrawParams:
    if params.seed is None:
        raise InvalidArgumentError("sampling.seed is unset; workers draw none")
    return DrawParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
    )


def add_output(pending: dict[int, RequestOutput], output: RequestOutput) -> None:
    """Adds an output to those of its request that wait, by candidate.

    The request's last output stays the last. Where it bears the number of a
    candidate that has ended, it is the end of the others, and stands by itself.
    """
    index, earlier = output.index, pending.get(output.index)
    if earlier is not None and earlier.finish_reason is not None:
        index = _REST
    elif earlier is not None:
        output = merge_outputs(earlier, output)
        if output.is_last:
            del pending[index]
    pending[index] = output


def merge_outputs(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two successive outputs of one candidate as one; the earlier one is not its end."""
    return RequestOutput(
        request_id=later.request_id,
        index=later.index,
        token_ids=earlier.token_ids + later.token_ids,
        finish_reason=later.finish_reason,
        is_last=later.is_last,
        error=later.error,
        score=later.score,
        logprobs=earlier.logprobs + later.logprobs,
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
        prefix_cache_queries=load.prefix_cache_queries,
        prefix_cache_hits=load.prefix_cache_hits,
        num_preemptions=load.num_preemptions,
        num_swapped_blocks=load.num_swapped_blocks,
    )


_MAX_KEYS = 2**16
"""Keys in one message; keeps it well below rpc.options.MAX_MESSAGE_BYTES."""


def kv_event_responses(events: Sequence[KvEvent]) -> Iterator[worker_pb2.WatchKvEventsResponse]:
    """The events in as few messages as they fit in. One with more keys than a message
    holds becomes several of its number.
    """
    response, num_keys = worker_pb2.WatchKvEventsResponse(), 0
    for event in events:
        for part in _parts(event):
            if num_keys + len(_keys(part)) > _MAX_KEYS:
                yield response
                response, num_keys = worker_pb2.WatchKvEventsResponse(), 0
            response.events.append(_message(part))
            num_keys += len(_keys(part))
    if response.events:
        yield response


def _parts(event: KvEvent) -> Iterator[KvEvent]:
    keys = _keys(event)
    if len(keys) <= _MAX_KEYS:
        yield event
        return
    for start in range(0, len(keys), _MAX_KEYS):
        part = keys[start : start + _MAX_KEYS]
        if isinstance(event, BlocksStored):
            yield BlocksStored(event.sequence_number, part, _parent(event, start))
        else:
            yield BlocksRemoved(event.sequence_number, part)


def _parent(event: BlocksStored, start: int) -> bytes | None:
    """What the part from `start` on follows; a snapshot's keys, which have no order, nothing."""
    return event.keys[start - 1] if start and event.parent is not None else event.parent


def _keys(event: KvEvent) -> tuple[bytes, ...]:
    return event.keys if isinstance(event, BlocksStored | BlocksRemoved) else ()


def _message(event: KvEvent) -> worker_pb2.KvEvent:
    message = worker_pb2.KvEvent(sequence_number=event.sequence_number)
    match event:
        case BlocksStored(_, keys, parent):
            message.stored.keys.extend(keys)
            if parent is not None:
                message.stored.parent = parent
        case BlocksRemoved(_, keys):
            message.removed.keys.extend(keys)
        case _:
            message.cleared.SetInParent()
    return message
