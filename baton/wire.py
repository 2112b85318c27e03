"""The public Python types as `baton.v1` messages and back: pure functions.

`Client` and `AsyncClient` share them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from baton.errors import InternalError, InvalidArgumentError
from baton.results import (
    CompletionChunk,
    CompletionOutput,
    Logprobs,
    ModelDescription,
    RequestOutput,
    Timings,
    Usage,
    logprobs_of,
)
from baton.sampling_params import SamplingParams, stated_params
from baton.spec_wire import sampling_to_proto, stopping_to_proto, text_to_proto
from baton.v1 import common_pb2, generation_pb2

__all__ = [
    "Params",
    "RequestOptions",
    "build_request",
    "parse_chunk",
    "parse_model",
    "parse_output",
]

Params = SamplingParams | Mapping[str, Any] | None
"""Sampling parameters of a request. `SamplingParams` state every field; a mapping states the
fields that it has, except those whose value is None (for `max_tokens`, None is a value: as many
as fit); None states no field. Fields that are not stated take the server's defaults.
"""

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORTED: "abort",
}


class RequestOptions(TypedDict, total=False):
    """Options of a request besides its prompt and sampling parameters.

    Attributes:
        request_id: names the request in logs; default: the router chooses one.
        priority: lower is scheduled first; default 0.
        cache_salt: requests share cached prefixes only under the same salt.
    """

    request_id: str
    priority: int
    cache_salt: str


def build_request(
    prompt: str | Sequence[int],
    params: Params,
    model: str,
    *,
    request_id: str = "",
    priority: int = 0,
    cache_salt: str = "",
) -> generation_pb2.GenerateRequest:
    """The message that asks for a completion.

    Raises:
        InvalidArgumentError: a value is out of range, or the message cannot hold it.
        TypeError: `params` has a field that `SamplingParams` does not have.
    """
    checked, stated = _checked(params)
    try:
        request = generation_pb2.GenerateRequest(
            request_id=request_id,
            model=model,
            sampling=sampling_to_proto(checked, stated),
            stopping=stopping_to_proto(checked, stated),
            text_params=text_to_proto(checked, stated),
            priority=priority,
            cache_salt=cache_salt,
        )
        _set_prompt(request, prompt)
    except ValueError as error:  # out of the field's range, or a lone surrogate
        raise InvalidArgumentError(f"the request cannot be sent: {error}") from error
    return request


def _checked(params: Params) -> tuple[SamplingParams, Collection[str]]:
    """Returns the parameters, and the names of those that are stated."""
    if isinstance(params, SamplingParams):
        return params, SamplingParams.__slots__
    stated = stated_params(params or {})
    # The server's `max_tokens` may be larger than the default, which would limit `min_tokens`.
    return SamplingParams(**{"max_tokens": None, **stated}), stated.keys()


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: str | Sequence[int]) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    else:
        # An empty list must still set the kind of the prompt.
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)


def parse_output(
    response: generation_pb2.GenerateResponse, prompt: str | Sequence[int]
) -> RequestOutput:
    """The public form of a whole completion.

    Args:
        response: the server's.
        prompt: the request's. Its token ids are used if the response has none.
    """
    if not response.completions:
        raise InternalError("the server answered without a completion")
    text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, list(prompt))
    return RequestOutput(
        request_id=response.request_id,
        outputs=[_parse_completion(completion) for completion in response.completions],
        usage=_parse_usage(response.usage),
        timings=_parse_timings(response.timings),
        prompt=text,
        # With `truncate_prompt_tokens`, the server's differ from the caller's.
        prompt_token_ids=list(response.prompt_token_ids) or token_ids,
        prompt_logprobs=_parse_prompt_logprobs(response),
    )


def _parse_completion(completion: generation_pb2.Completion) -> CompletionOutput:
    return CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=list(completion.token_ids),
        finish_reason=_FINISH_REASONS.get(completion.finish_reason, "unknown"),
        stop_reason=_parse_stop_reason(completion.matched_stop),
        score=completion.score if completion.HasField("score") else None,
        logprobs=_parse_logprobs(completion.token_ids, completion.logprobs),
    )


def parse_chunk(response: generation_pb2.GenerateStreamResponse) -> CompletionChunk:
    """The public form of a message of a stream."""
    is_finished = response.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
    is_last = response.HasField("usage")
    return CompletionChunk(
        request_id=response.request_id,
        index=response.index,
        text=response.text,
        token_ids=list(response.token_ids),
        finish_reason=(
            _FINISH_REASONS.get(response.finish_reason, "unknown") if is_finished else None
        ),
        stop_reason=_parse_stop_reason(response.matched_stop),
        score=response.score if response.HasField("score") else None,
        usage=_parse_usage(response.usage) if is_last else None,
        timings=_parse_timings(response.timings) if is_last else None,
        logprobs=_parse_logprobs(response.token_ids, response.logprobs),
        prompt_token_ids=list(response.prompt_token_ids) or None,
        prompt_logprobs=_parse_prompt_logprobs(response),
    )


def parse_model(response: generation_pb2.GetModelResponse) -> ModelDescription:
    """The public form of a model's description."""
    return ModelDescription(
        name=response.model,
        max_model_len=response.max_model_len,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
        block_size=response.block_size,
        namespace=response.namespace,
    )


def _parse_logprobs(
    token_ids: Sequence[int], messages: Sequence[common_pb2.TokenLogprobs]
) -> list[Logprobs] | None:
    """The log-probabilities of tokens; None if the request did not ask for them."""
    if not messages:
        return None
    return [
        logprobs_of(
            token_id, message.logprob, message.rank, message.top_token_ids, message.top_logprobs
        )
        for token_id, message in zip(token_ids, messages, strict=True)
    ]


def _parse_prompt_logprobs(
    response: generation_pb2.GenerateResponse | generation_pb2.GenerateStreamResponse,
) -> list[Logprobs | None] | None:
    """The log-probabilities of the prompt's tokens; None for the first token, and None if the
    request did not ask for them or ended before they were computed.
    """
    later = response.prompt_token_ids[1:]
    if not response.prompt_token_ids or len(later) != len(response.prompt_logprobs):
        return None
    return [None, *(_parse_logprobs(later, response.prompt_logprobs) or ())]


def _parse_stop_reason(stop: common_pb2.MatchedStop) -> str | int | None:
    match stop.WhichOneof("match"):
        case "text":
            return stop.text
        case "token_id":
            return stop.token_id
    return None


def _parse_usage(usage: common_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _parse_timings(timings: common_pb2.Timings) -> Timings:
    return Timings(**{stage.name: getattr(timings, stage.name) for stage in fields(Timings)})
