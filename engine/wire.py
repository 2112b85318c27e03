"""Engine data as `baton.v1` messages and back: pure functions that both tiers use.

`baton.common.request.spec_wire` converts requests, `rpc.errors` converts errors.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace

from baton.common.errors import FailedPreconditionError
from baton.v1 import common_pb2, request_pb2, worker_pb2
from engine.batch import TokenLogprobs
from engine.kv_cache.events import (
    BlocksMissing,
    BlocksRemoved,
    BlocksSaved,
    BlocksStored,
    CacheCleared,
    KvEvent,
)
from engine.kv_cache.spec import KvCacheSpec
from engine.metrics.counts import EngineMetrics
from engine.request import CandidateProgress, EngineLoad, EngineOutput, FinishReason, StageTimings
from kvstore.guard.metrics import KvMetrics
from kvstore.guard.status import BackendStatus
from kvstore.handoff import brief_digest

__all__ = [
    "cache_groups_to_proto",
    "check_namespace",
    "counters_to_proto",
    "finish_reason_to_proto",
    "kv_backends_to_proto",
    "kv_event_responses",
    "load_to_proto",
    "logprobs_to_proto",
    "output_to_proto",
    "progress_from_proto",
    "timings_to_proto",
]

_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    # The generation continues on decode.
    FinishReason.HANDOFF: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: common_pb2.FINISH_REASON_ABORTED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}

_GROUP = worker_pb2.CacheGroup
_LOAD_FIELDS = tuple(field.name for field in fields(EngineLoad))

_MAX_KEYS = 2**12
"""Keys in one message, which a router applies in a few milliseconds."""


# Requests.


def check_namespace(namespace: bytes, own: bytes) -> None:
    """Refuses a request of a router whose block keys start from another digest.

    Args:
        namespace: the digest that the request carries.
        own: this replica's digest.

    Raises:
        FailedPreconditionError: the digests differ; names both.
    """
    if namespace != own:
        raise FailedPreconditionError(
            f"KV namespace: the request has {brief_digest(namespace)}, "
            f"this replica {brief_digest(own)}"
        )


def progress_from_proto(
    messages: Iterable[request_pb2.CandidateProgress],
) -> tuple[CandidateProgress, ...]:
    """The tokens that other replicas have generated."""
    return tuple(
        CandidateProgress(
            message.index,
            tuple(message.output_token_ids),
            message.logprob,
            _logprobs_from_proto(message.token_logprobs),
        )
        for message in messages
    )


def _logprobs_from_proto(
    messages: Iterable[common_pb2.TokenLogprobs],
) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            message.logprob,
            message.rank,
            tuple(message.top_token_ids),
            tuple(message.top_logprobs),
        )
        for message in messages
    )


# Outputs.


def output_to_proto(
    output: EngineOutput, error: request_pb2.WorkerError | None = None
) -> request_pb2.CandidateOutput:
    """The message of an output.

    Args:
        output: the engine's.
        error: the message of `output.error`.
    """
    message = request_pb2.CandidateOutput(
        request_id=output.request_id,
        index=output.index,
        token_ids=output.token_ids,
        finish_reason=finish_reason_to_proto(output.finish_reason),
        is_last=output.is_last,
        error=error,
        score=output.score,
        cached_tokens=output.cached_tokens,
        timings=timings_to_proto(output.timings),
    )
    if output.accepted_drafts or output.rejected_drafts:
        message.accepted_drafts = output.accepted_drafts
        message.rejected_drafts = output.rejected_drafts
    # Most requests ask for neither; this runs once per token.
    if output.logprobs:
        message.logprobs.extend(logprobs_to_proto(output.logprobs))
    if output.prompt_logprobs:
        message.prompt_logprobs.extend(logprobs_to_proto(output.prompt_logprobs))
    return message


def logprobs_to_proto(tokens: Iterable[TokenLogprobs]) -> list[common_pb2.TokenLogprobs]:
    """The messages of the tokens' log-probabilities; their fields have the same names."""
    return [
        common_pb2.TokenLogprobs(
            logprob=token.logprob,
            rank=token.rank,
            top_token_ids=token.top_token_ids,
            top_logprobs=token.top_logprobs,
        )
        for token in tokens
    ]


def finish_reason_to_proto(reason: FinishReason | None) -> "common_pb2.FinishReason.ValueType":
    """The finish reason on the wire; UNSPECIFIED if the generation continues."""
    return _FINISH_REASONS[reason]


def timings_to_proto(timings: StageTimings | None) -> common_pb2.Timings | None:
    """The message of an engine's stages; None for None."""
    if timings is None:
        return None
    return common_pb2.Timings(
        queue_ms=timings.queue_ms,
        prefill_ms=timings.prefill_ms,
        transfer_ms=timings.transfer_ms,
        load_ms=timings.load_ms,
    )


def load_to_proto(
    load: EngineLoad, statuses: Sequence[BackendStatus] = ()
) -> worker_pb2.WorkerLoad:
    """The message of an engine's load, whose fields have the same names, and of its stores."""
    own = {name: getattr(load, name) for name in _LOAD_FIELDS}
    return worker_pb2.WorkerLoad(**own, kv_store_ids=_kv_store_ids(statuses))


def kv_backends_to_proto(statuses: Iterable[BackendStatus]) -> list[worker_pb2.KvBackendStatus]:
    """The messages of the backends of a KV connector; their fields have the same names."""
    return [worker_pb2.KvBackendStatus(**asdict(status)) for status in statuses]


def _kv_store_ids(statuses: Sequence[BackendStatus]) -> list[str]:
    """The identities of the stores through which alone an engine hands prompts over; none while one
    is unknown, and where peers lend blocks.
    """
    ids = [status.identity for status in statuses]
    return ids if all(ids) else []


def counters_to_proto(metrics: EngineMetrics, transfers: KvMetrics) -> worker_pb2.WorkerCounters:
    """The message of what an engine has done."""
    values = metrics.snapshot().values
    return worker_pb2.WorkerCounters(
        prompt_tokens=int(values["baton_engine_prompt_tokens",]),
        loaded_tokens=int(values["baton_engine_cached_prompt_tokens", "loaded"]),
        generated_tokens=int(values["baton_engine_generated_tokens",]),
        saved_bytes=int(transfers.total("baton_kv_bytes", "save")),
        loaded_bytes=int(transfers.total("baton_kv_bytes", "load")),
        failed_transfers=int(transfers.total("baton_kv_failures")),
    )


# The prefix cache.


def cache_groups_to_proto(
    spec: KvCacheSpec, num_blocks: int, num_slots: int
) -> list[worker_pb2.CacheGroup]:
    """The messages of an engine's layer groups.

    Args:
        spec: the layer groups.
        num_blocks: blocks in the pool.
        num_slots: slots for states in the pool.
    """
    groups = []
    for window in spec.windows:
        kind = _GROUP.KIND_FULL if window is None else _GROUP.KIND_WINDOW
        blocks = 0 if window is None else -(-(window - 1) // spec.block_size)
        groups.append(_GROUP(kind=kind, window_blocks=blocks, max_blocks=num_blocks))
    if spec.state_group is not None:
        groups.append(_GROUP(kind=_GROUP.KIND_STATE, max_blocks=num_slots))
    return groups


def kv_event_responses(events: Sequence[KvEvent]) -> Iterator[worker_pb2.WatchKvEventsResponse]:
    """Packs events into as few messages as can hold them. An event with more keys than a
    message holds is split into several events with its number.
    """
    response, num_keys = worker_pb2.WatchKvEventsResponse(), 0
    for event in events:
        for part in _parts(event):
            if num_keys + len(_keys(part)) > _MAX_KEYS:
                yield response
                response, num_keys = worker_pb2.WatchKvEventsResponse(), 0
            response.events.append(_event_to_proto(part))
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
        if isinstance(event, BlocksStored) and start:
            yield replace(event, keys=part, parent=keys[start - 1])
        elif not isinstance(event, CacheCleared):
            yield replace(event, keys=part)


def _keys(event: KvEvent) -> tuple[bytes, ...]:
    return () if isinstance(event, CacheCleared) else event.keys


def _event_to_proto(event: KvEvent) -> worker_pb2.KvEvent:
    message = worker_pb2.KvEvent(sequence_number=event.sequence_number)
    match event:
        case BlocksStored(_, keys, parent, layer_group):
            message.stored.keys.extend(keys)
            message.stored.group = layer_group
            if parent is not None:
                message.stored.parent = parent
        case BlocksRemoved(_, keys, layer_group):
            message.removed.keys.extend(keys)
            message.removed.group = layer_group
        case BlocksSaved(_, keys, ttl_s):
            message.saved.keys.extend(keys)
            message.saved.ttl_s = ttl_s
        case BlocksMissing(_, keys):
            message.missing.keys.extend(keys)
        case CacheCleared():
            message.cleared.SetInParent()
    return message
