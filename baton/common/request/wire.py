"""The public Python types as `baton.v1` messages and back: pure functions.

`Client` and `AsyncClient` share them.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypedDict, Unpack

from baton.common.errors import InternalError, InvalidArgumentError
from baton.common.request.answer import logprobs_by_token, prompt_logprobs_by_token
from baton.common.request.default_params import stated_params
from baton.common.request.prompts import ParsedPrompt, Prompt, is_single, parse_prompts
from baton.common.request.results import (
    STAGES,
    CompletionChunk,
    CompletionOutput,
    Logprobs,
    ModelDescription,
    RequestOutput,
    Timings,
    Usage,
)
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.spec_wire import sampling_to_proto, stopping_to_proto, text_to_proto
from baton.v1 import common_pb2, generation_pb2

__all__ = [
    "FINISH_REASONS",
    "ChatOptions",
    "ChatRequestOptions",
    "Params",
    "RequestOptions",
    "build_chat_request",
    "build_request",
    "parse_chunk",
    "parse_model",
    "parse_output",
    "parse_response",
    "parse_timings",
]

Params = SamplingParams | Mapping[str, Any] | None
"""Sampling parameters of a request. `SamplingParams` state every field; a mapping states the
fields that it has, except those whose value is None (for `max_tokens`, None is a value: as many
as fit); None states no field. Fields that are not stated take the server's defaults.
"""

_NO_PROMPT = ParsedPrompt()
_JSON_OPTIONS = ("tools", "documents", "chat_template_kwargs")
FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORTED: "abort",
}
"""The public names of finish reasons."""


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


class ChatOptions(TypedDict, total=False):
    """How the messages of a chat become a prompt.

    Attributes:
        tools: tools that the model may call, as in OpenAI's chat API.
        documents: documents for templates that read them.
        chat_template_kwargs: further variables of the template.
        add_generation_prompt: whether the prompt ends with the start of an answer; default: true,
            unless `continue_final_message` is set.
        continue_final_message: whether the answer continues the text of the last message.
    """

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool


class ChatRequestOptions(ChatOptions, RequestOptions, total=False):
    """Options of a chat besides its messages and sampling parameters."""


def build_request(
    prompt: Prompt | Sequence[Prompt],
    params: Params,
    model: str,
    **options: Unpack[RequestOptions],
) -> generation_pb2.GenerateRequest:
    """The message that asks for a completion of a prompt, or of each of several prompts.

    Raises:
        InvalidArgumentError: a value is out of range, the message cannot hold it, or prompts
            have different `cache_salt`.
        TypeError: `params` has a field that `SamplingParams` does not have.
    """
    parsed = _parsed(prompt)
    options.setdefault("cache_salt", _common_salt(parsed))
    request = _request_without_prompt(params, model, **options)
    with _unencodable():
        if _is_several(prompt):
            request.prompts.SetInParent()
            for parsed_prompt in parsed:
                _set_prompt(request.prompts.prompts.add(), parsed_prompt)
        else:
            _set_prompt(request, parsed[0])
    return request


def build_chat_request(
    messages: Sequence[Mapping[str, Any]],
    params: Params,
    model: str,
    **options: Unpack[ChatRequestOptions],
) -> generation_pb2.GenerateRequest:
    """The message that asks for an answer in a chat.

    Raises:
        InvalidArgumentError: a value is out of range, or the message cannot hold it.
        TypeError: `params` has a field that `SamplingParams` does not have, or an option is
            unknown.
    """
    remaining: dict[str, Any] = dict(options)
    chat = {name: remaining.pop(name) for name in ChatOptions.__annotations__ if name in remaining}
    request = _request_without_prompt(params, model, **remaining)
    texts = {"messages": messages} | {n: chat[n] for n in _JSON_OPTIONS if chat.get(n) is not None}
    with _unencodable():
        request.chat.SetInParent()
        for name, value in texts.items():
            setattr(request.chat, f"{name}_json", _json(name, value))
        if chat.get("add_generation_prompt") is not None:
            request.chat.add_generation_prompt = chat["add_generation_prompt"]
        request.chat.continue_final_message = chat.get("continue_final_message", False)
    return request


def _is_several(prompt: Any) -> bool:
    """Whether the value is a list of prompts. An empty list is one prompt without tokens."""
    return not is_single(prompt) and len(prompt) > 0


def _parsed(prompt: Any) -> list[ParsedPrompt]:
    return parse_prompts(prompt if _is_several(prompt) else [prompt])


def _common_salt(prompts: Sequence[ParsedPrompt]) -> str:
    salts = {prompt.cache_salt for prompt in prompts}
    if len(salts) > 1:
        raise InvalidArgumentError("prompts of one request have different cache_salt; send several")
    return salts.pop()


def _request_without_prompt(
    params: Params,
    model: str,
    *,
    request_id: str = "",
    priority: int = 0,
    cache_salt: str = "",
) -> generation_pb2.GenerateRequest:
    checked, stated = _checked(params)
    with _unencodable():
        return generation_pb2.GenerateRequest(
            request_id=request_id,
            model=model,
            sampling=sampling_to_proto(checked, stated),
            stopping=stopping_to_proto(checked, stated),
            text_params=text_to_proto(checked, stated),
            priority=priority,
            cache_salt=cache_salt,
        )


@contextmanager
def _unencodable() -> Iterator[None]:
    """Refuses values that are out of a field's range, and lone surrogates."""
    try:
        yield
    except ValueError as error:
        raise InvalidArgumentError(f"the request cannot be sent: {error}") from error


def _json(field: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{field} is not JSON data: {error}") from error


def _checked(params: Params) -> tuple[SamplingParams, Collection[str]]:
    """Returns the parameters, and the names of those that are stated."""
    if isinstance(params, SamplingParams):
        return params, SamplingParams.__slots__
    stated = stated_params(params or {})
    # The server's `max_tokens` may be larger than the default, which would limit `min_tokens`.
    return SamplingParams(**{"max_tokens": None, **stated}), stated.keys()


def _set_prompt(
    message: generation_pb2.GenerateRequest | generation_pb2.Prompt, prompt: ParsedPrompt
) -> None:
    if prompt.token_ids is None:
        message.text = prompt.text or ""
    else:
        # An empty list must still set the kind of the prompt.
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(prompt.token_ids)


def parse_response(
    response: generation_pb2.GenerateResponse, prompt: Prompt | Sequence[Prompt]
) -> RequestOutput | list[RequestOutput]:
    """The public form of the response to one prompt, or a list for several.

    Args:
        response: the server's.
        prompt: as in `build_request`.

    Raises:
        InternalError: the server did not answer each prompt.
    """
    prompts = _parsed(prompt)
    if not _is_several(prompt):
        return parse_output(response, prompts[0])
    responses = response.responses
    if len(responses) != len(prompts):
        raise InternalError(f"the server answered {len(responses)} of {len(prompts)} prompts")
    return [
        parse_output(of_prompt, asked) for of_prompt, asked in zip(responses, prompts, strict=True)
    ]


def parse_output(
    response: generation_pb2.GenerateResponse, prompt: ParsedPrompt = _NO_PROMPT
) -> RequestOutput:
    """The public form of a whole completion.

    Args:
        response: the server's.
        prompt: the request's. Its token ids are used if the response has none. A chat has
            neither text nor tokens.

    Raises:
        InternalError: the response has no completion.
    """
    if not response.completions:
        raise InternalError("the server answered without a completion")
    token_ids = None if prompt.token_ids is None else list(prompt.token_ids)
    return RequestOutput(
        request_id=response.request_id,
        outputs=[_parse_completion(completion) for completion in response.completions],
        usage=_parse_usage(response.usage),
        timings=parse_timings(response.timings),
        prompt=prompt.text,
        # With `truncate_prompt_tokens`, the server's differ from the caller's.
        prompt_token_ids=list(response.prompt_token_ids) or token_ids,
        prompt_logprobs=prompt_logprobs_by_token(
            response.prompt_token_ids, response.prompt_logprobs
        ),
    )


def _parse_completion(completion: generation_pb2.Completion) -> CompletionOutput:
    return CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=list(completion.token_ids),
        finish_reason=FINISH_REASONS.get(completion.finish_reason, "unknown"),
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
            FINISH_REASONS.get(response.finish_reason, "unknown") if is_finished else None
        ),
        stop_reason=_parse_stop_reason(response.matched_stop),
        score=response.score if response.HasField("score") else None,
        usage=_parse_usage(response.usage) if is_last else None,
        timings=parse_timings(response.timings) if is_last else None,
        logprobs=_parse_logprobs(response.token_ids, response.logprobs),
        prompt_token_ids=list(response.prompt_token_ids) or None,
        prompt_logprobs=prompt_logprobs_by_token(
            response.prompt_token_ids, response.prompt_logprobs
        ),
        prompt_index=response.prompt_index,
    )


def parse_model(response: generation_pb2.GetModelResponse) -> ModelDescription:
    """The public form of a model's description."""
    return ModelDescription(
        name=response.model,
        max_model_len=response.max_model_len,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
        block_size=response.block_size,
        namespace=response.kv_namespace,
    )


def _parse_logprobs(
    token_ids: Sequence[int], messages: Sequence[common_pb2.TokenLogprobs]
) -> list[Logprobs] | None:
    """The log-probabilities of tokens; None if the request did not ask for them."""
    return logprobs_by_token(token_ids, messages) if messages else None


def _parse_stop_reason(stop: common_pb2.MatchedStop) -> str | int | None:
    match stop.WhichOneof("match"):
        case "text":
            return stop.text
        case "token_id":
            return stop.token_id
    return None


def _parse_usage(usage: common_pb2.Usage) -> Usage:
    return Usage(**{count.name: getattr(usage, count.name) for count in fields(Usage)})


def parse_timings(timings: common_pb2.Timings) -> Timings:
    """The public form of the times per stage."""
    return Timings(**{name: getattr(timings, name) for name in STAGES})
