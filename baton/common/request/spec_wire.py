"""`SamplingParams` and `RequestSpec` as `baton.v1` messages and back.

A leaf module that client, router and workers share. The fields of the messages
`SamplingParams`, `StoppingParams` and `TextParams` have the names of the dataclass's
fields, so a new sampling parameter needs no line here. The exceptions are beam search and
`structured_outputs`, which have messages of their own, and `extra_args`, which is a JSON text.
"""

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import asdict
from operator import attrgetter
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from baton.common.errors import InvalidArgumentError
from baton.common.request.known_fields import check_known, check_value
from baton.common.request.request_spec import ReasoningMarks, ReasoningStart, RequestSpec
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.schema_parts import SchemaPart
from baton.common.request.structured_outputs import StructuredOutputs
from baton.v1 import common_pb2, request_pb2

__all__ = [
    "params_from_proto",
    "read_message",
    "sampling_to_proto",
    "spec_from_proto",
    "spec_to_proto",
    "stated_from_proto",
    "stopping_to_proto",
    "text_to_proto",
]

_EARLY_STOPPING = {
    False: common_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: common_pb2.EARLY_STOPPING_FIRST_FINISHED,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}
_MAX_INLINE_BYTES = 16 * 1024
_Result = TypeVar("_Result")
_ALL_NAMES = tuple(SamplingParams.__slots__)
_ALL_FIELDS = frozenset(_ALL_NAMES)
_all_values = attrgetter(*_ALL_NAMES)
_DEFAULTS = _all_values(SamplingParams())
_ALWAYS_SENT = ("max_tokens", "seed")
_NEVER_SENT = ("prediction",)  # workers get its tokens
_EARLY_STOPPING_OF: dict[int, Any] = {number: value for value, number in _EARLY_STOPPING.items()}


def _plain_fields(message: Descriptor) -> tuple[str, ...]:
    """The names of a message's fields that are maps, or no messages themselves."""
    return tuple(
        field.name
        for field in message.fields
        if field.message_type is None or field.message_type.GetOptions().map_entry
    )


_EXTRA_ARGS = "extra_args_json"
_SAMPLING_FIELDS = tuple(
    name for name in _plain_fields(common_pb2.SamplingParams.DESCRIPTOR) if name != _EXTRA_ARGS
)
_OUTPUTS_FIELDS = tuple(name for name in StructuredOutputs.__slots__ if name != "parts")
_STOPPING_FIELDS = _plain_fields(common_pb2.StoppingParams.DESCRIPTOR)
_TEXT_FIELDS = _plain_fields(common_pb2.TextParams.DESCRIPTOR)


def sampling_to_proto(
    params: SamplingParams, only: Collection[str] = _ALL_FIELDS
) -> common_pb2.SamplingParams:
    """The message that says how tokens are drawn, and how many candidates.

    Args:
        params: the parameters.
        only: the names of the fields to set.

    Raises:
        ValueError: a value that the message cannot hold.
    """
    values = {name: getattr(params, name) for name in _SAMPLING_FIELDS if name in only}
    message = common_pb2.SamplingParams(**values, beam_search=_beam_search(params))
    outputs = params.structured_outputs
    if outputs is not None and "structured_outputs" in only:
        form = {name: getattr(outputs, name) or None for name in _OUTPUTS_FIELDS}
        parts = [common_pb2.SchemaPart(**asdict(part)) for part in outputs.parts]
        message.structured_outputs.MergeFrom(common_pb2.StructuredOutputs(**form, parts=parts))
    if params.extra_args is not None and "extra_args" in only:
        # Without whitespace, as the receiver limits the text's bytes.
        message.extra_args_json = json.dumps(
            params.extra_args, ensure_ascii=False, separators=(",", ":")
        )
    return message


def stopping_to_proto(
    params: SamplingParams, only: Collection[str] = _ALL_FIELDS
) -> common_pb2.StoppingParams:
    """The message that says when the generation ends; otherwise like `sampling_to_proto`."""
    values = {name: getattr(params, name) for name in _STOPPING_FIELDS if name in only}
    return common_pb2.StoppingParams(**values)


def text_to_proto(
    params: SamplingParams, only: Collection[str] = _ALL_FIELDS
) -> common_pb2.TextParams:
    """The message that says how text is made into tokens and back; otherwise like
    `sampling_to_proto`.
    """
    values = {name: getattr(params, name) for name in _TEXT_FIELDS if name in only}
    return common_pb2.TextParams(**values)


def params_from_proto(
    sampling: common_pb2.SamplingParams,
    stopping: common_pb2.StoppingParams,
    text: common_pb2.TextParams | None = None,
) -> SamplingParams:
    """The parameters that the messages set, and the dataclass's defaults for the others.

    Args:
        sampling: how tokens are drawn.
        stopping: when the generation ends.
        text: how text is made into tokens and back.

    Raises:
        InvalidArgumentError: a value is out of range; names the field.
    """
    return SamplingParams(**stated_from_proto(sampling, stopping, text))


def stated_from_proto(
    sampling: common_pb2.SamplingParams,
    stopping: common_pb2.StoppingParams,
    text: common_pb2.TextParams | None = None,
) -> dict[str, Any]:
    """The fields of `SamplingParams` that the messages set; explicit zeros stay zeros. Arguments
    are those of `params_from_proto`.

    Raises:
        InvalidArgumentError: a value that has a message of its own is wrong; names the field.
    """
    stated: dict[str, Any] = {field.name: value for field, value in sampling.ListFields()}
    for message in (stopping, text):
        if message is not None:
            stated |= {field.name: value for field, value in message.ListFields()}
    beam_search: common_pb2.BeamSearch | None = stated.pop("beam_search", None)
    if beam_search is not None:
        stated |= _beam_search_fields(beam_search)
    outputs: common_pb2.StructuredOutputs | None = stated.get("structured_outputs")
    if outputs is not None:
        form = {field.name: value for field, value in outputs.ListFields()}
        form["parts"] = [
            SchemaPart(pointer=part.pointer, field=part.field, is_hint=part.is_hint, root=part.root)
            for part in outputs.parts
        ]
        stated["structured_outputs"] = StructuredOutputs(**form)
    if _EXTRA_ARGS in stated:
        stated["extra_args"] = stated.pop(_EXTRA_ARGS)
    return stated


def spec_to_proto(
    spec: RequestSpec, message: request_pb2.RequestSpec | None = None
) -> request_pb2.RequestSpec:
    """The message that carries a spec to a worker, with the time left until its deadline.

    It sets only the parameters that differ from the defaults, so that an older worker, which
    refuses fields that it does not know, accepts requests that do not need them.

    Args:
        spec: the spec.
        message: an empty message to write to, say a part of another one: a message that becomes
            a part is copied, which takes milliseconds for a long prompt.

    Raises:
        DeadlineExceededError: the deadline has passed.
    """
    values = zip(_ALL_NAMES, _all_values(spec.params), _DEFAULTS, strict=True)
    only = {name for name, value, default in values if value != default}
    only = only.union(_ALWAYS_SENT).difference(_NEVER_SENT)
    message = request_pb2.RequestSpec() if message is None else message
    message.prompt_token_ids.extend(spec.prompt_token_ids)
    parts = request_pb2.RequestSpec(
        request_id=spec.request_id,
        sampling=sampling_to_proto(spec.params, only),
        stopping=stopping_to_proto(spec.params, only),
        stop_token_ids=sorted(spec.stop_token_ids),
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        timeout_ms=max(int(spec.remaining_s() * 1000), 1),
        bad_words_token_ids=[
            common_pb2.TokenIds(ids=token_ids) for token_ids in spec.bad_words_token_ids
        ],
        reasoning=_reasoning_to_proto(spec.reasoning),
        traceparent=spec.traceparent,
        prediction_token_ids=spec.prediction_token_ids,
    )
    message.MergeFrom(parts)
    return message


def spec_from_proto(message: request_pb2.RequestSpec, *, now: float) -> RequestSpec:
    """The spec that a worker received.

    Args:
        message: the router's.
        now: `time.monotonic()`, from which the message's timeout counts.

    Raises:
        FailedPreconditionError: the router set a field that this build does not know.
        InvalidArgumentError: a field is missing or out of range; names the field, its
            value and the limit.
    """
    check_known(message, "worker", "router", "spec")
    if not message.request_id:
        raise InvalidArgumentError.for_field("request_id", "", "not empty")
    if message.timeout_ms < 1:
        raise InvalidArgumentError.for_field("timeout_ms", message.timeout_ms, ">= 1")
    params = params_from_proto(message.sampling, message.stopping)
    if not message.stopping.HasField("max_tokens"):
        raise InvalidArgumentError("stopping.max_tokens is unset; the router must set it")
    if params.seed is None:
        raise InvalidArgumentError("sampling.seed is unset; the router must set it")
    return RequestSpec(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        params=params,
        stop_token_ids=frozenset(message.stop_token_ids),
        priority=message.priority,
        cache_salt=message.cache_salt,
        deadline=now + message.timeout_ms / 1000,
        bad_words_token_ids=tuple(tuple(words.ids) for words in message.bad_words_token_ids),
        reasoning=_reasoning_from_proto(message),
        traceparent=message.traceparent,
        prediction_token_ids=tuple(message.prediction_token_ids),
    )


async def read_message(message: Message, read: Callable[[], _Result]) -> _Result:
    """Returns what a function makes of a message. A thread calls it for large ones: a schema of
    256 KiB would keep the event loop from other streams for 0.2 s, a prompt of 100,000 tokens for
    30 ms.
    """
    if message.ByteSize() <= _MAX_INLINE_BYTES:
        return read()
    return await asyncio.to_thread(read)


def _reasoning_to_proto(marks: ReasoningMarks | None) -> request_pb2.ReasoningMarks | None:
    if marks is None:
        return None
    return request_pb2.ReasoningMarks(
        start_token_ids=marks.start_token_ids,
        end_token_ids=marks.end_token_ids,
        start=marks.start.value,  # type: ignore[arg-type]  # the enumerations have the same numbers
    )


def _reasoning_from_proto(message: request_pb2.RequestSpec) -> ReasoningMarks | None:
    if not message.HasField("reasoning"):
        return None
    marks = message.reasoning
    if not marks.end_token_ids:
        raise InvalidArgumentError("reasoning.end_token_ids is empty; the router must set it")
    return ReasoningMarks(
        tuple(marks.start_token_ids),
        tuple(marks.end_token_ids),
        ReasoningStart(marks.start),
    )


def _beam_search(params: SamplingParams) -> common_pb2.BeamSearch | None:
    if params.beam_width is None:
        return None
    return common_pb2.BeamSearch(
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=_EARLY_STOPPING[params.early_stopping],
    )


def _beam_search_fields(message: common_pb2.BeamSearch) -> dict[str, Any]:
    number = message.early_stopping
    check_value("early_stopping", common_pb2.EarlyStopping.DESCRIPTOR, number)
    fields = {"beam_width": message.beam_width, "early_stopping": _EARLY_STOPPING_OF[number]}
    if message.HasField("length_penalty"):
        fields["length_penalty"] = message.length_penalty
    return fields
