"""The messages of `GenerationService` as requests, and answers as its messages."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from baton.common.errors import InvalidArgumentError
from baton.common.request.answer import (
    CandidateOutput,
    JoinedAnswer,
    JoinedCandidate,
    TokenCounts,
    TokenLogprobs,
)
from baton.common.request.generation import GenerationRequest, TextOrTokens, new_request_id
from baton.common.request.request_spec import ReasoningStart
from baton.common.request.results import STAGES, Timings
from baton.common.request.spec_wire import stated_from_proto
from baton.common.request.wire import FINISH_REASONS
from baton.v1 import common_pb2, generation_pb2
from router.chat.chat_request import ChatRequest, Conversation
from router.chat.messages import conversation_of
from router.requests.input_threads import call_by_length, convert_input
from router.requests.json_input import parse_json
from router.requests.validation import MAX_PROMPTS

__all__ = [
    "request_from_proto",
    "stream_response",
    "usage_to_proto",
    "whole_response",
]

_FINISH_REASONS = {name: number for number, name in FINISH_REASONS.items()}


async def request_from_proto(
    message: generation_pb2.GenerateRequest,
) -> GenerationRequest | ChatRequest:
    """The request of a client's message. Threads read large chats and schemas.

    Raises:
        InvalidArgumentError: there is no prompt, a text is not JSON, or a message of a chat or a
            structured output is malformed; names the field.
    """
    options: dict[str, Any] = {
        "request_id": message.request_id or new_request_id(),
        "priority": message.priority,
        "cache_salt": message.cache_salt,
    }
    if message.WhichOneof("prompt") == "chat":
        chat = message.chat
        conversation = await convert_input(chat.ByteSize(), _conversation, chat)
        return ChatRequest(conversation=conversation, params=await _stated(message), **options)
    prompts = _prompts(message)
    stated = await _stated(message)
    if message.HasField("add_special_tokens"):
        options["add_special_tokens"] = message.add_special_tokens
    return GenerationRequest(
        prompts=prompts,
        stated=stated,
        has_several=message.WhichOneof("prompt") == "prompts",
        reasoning_start=ReasoningStart(message.reasoning_start),
        **options,
    )


async def _stated(message: generation_pb2.GenerateRequest) -> dict[str, Any]:
    length = message.sampling.ByteSize()
    parts = message.sampling, message.stopping, message.text_params
    return await call_by_length(length, stated_from_proto, *parts)


def _prompts(message: generation_pb2.GenerateRequest) -> Sequence[TextOrTokens]:
    """The prompts; token ids are the message's own, not copied."""
    if message.WhichOneof("prompt") != "prompts":
        return (_prompt(message),)
    prompts = message.prompts.prompts
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise InvalidArgumentError(
            f"prompts has {len(prompts)} entries; it must have 1 to {MAX_PROMPTS}"
        )
    return [_prompt(prompt, f"prompts[{i}].") for i, prompt in enumerate(prompts)]


def _prompt(
    message: generation_pb2.GenerateRequest | generation_pb2.Prompt, path: str = ""
) -> TextOrTokens:
    """The prompt of a message; `path` is the place of the message, for errors."""
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return message.token_ids.ids
    forms = message.DESCRIPTOR.oneofs_by_name["prompt"].fields
    names = ", ".join(form.name for form in forms)
    raise InvalidArgumentError(f"{path}prompt is unset; set one of {names}")


def _conversation(chat: generation_pb2.Chat) -> Conversation:
    """The checked chat, whose fields are JSON texts."""
    is_stated = chat.HasField("add_generation_prompt")
    return conversation_of(
        _parsed("messages_json", chat.messages_json),
        tools=_parsed("tools_json", chat.tools_json),
        documents=_parsed("documents_json", chat.documents_json),
        add_generation_prompt=chat.add_generation_prompt if is_stated else None,
        continue_final_message=chat.continue_final_message,
        template_kwargs=_parsed("chat_template_kwargs_json", chat.chat_template_kwargs_json),
    )


def _parsed(field: str, text: str) -> Any:
    """The value of a JSON text; None for an empty one."""
    return parse_json(field, text) if text else None


def stream_response(output: CandidateOutput) -> generation_pb2.GenerateStreamResponse:
    """The message of a stream for an output."""
    response = generation_pb2.GenerateStreamResponse()  # arguments would cost more than this
    response.request_id = output.request_id
    response.token_ids.extend(output.token_ids)
    response.text = output.text
    response.index, response.prompt_index = output.index, output.prompt_index
    if output.logprobs:
        response.logprobs.extend(_messages(output.logprobs))
    if output.prompt_usage is not None:
        _add_prompt(response, output)
        response.prompt_usage.CopyFrom(usage_to_proto(output.prompt_usage))
    if output.finish_reason is not None:
        _add_end(response, output)
    if output.usage is not None:
        _add_totals(response, output)
    return response


def whole_response(answer: JoinedAnswer) -> generation_pb2.GenerateResponse:
    """The message of one prompt's answer, which has ended."""
    response = generation_pb2.GenerateResponse(
        request_id=answer.last.request_id, completions=map(_completion, answer.candidates)
    )
    _add_prompt(response, answer.first)
    _add_totals(response, answer.last)
    return response


def _completion(candidate: JoinedCandidate) -> generation_pb2.Completion:
    completion = generation_pb2.Completion(
        index=candidate.index,
        text="".join(candidate.texts),
        token_ids=candidate.token_ids,
        logprobs=_messages(candidate.logprobs),
    )
    _add_end(completion, candidate.last)
    return completion


def _add_totals(
    response: generation_pb2.GenerateStreamResponse | generation_pb2.GenerateResponse,
    output: CandidateOutput,
) -> None:
    if output.usage is not None and output.timings is not None:
        response.usage.CopyFrom(usage_to_proto(output.usage))
        response.timings.CopyFrom(_timings(output.timings))


def _add_prompt(
    response: generation_pb2.GenerateStreamResponse | generation_pb2.GenerateResponse,
    output: CandidateOutput,
) -> None:
    response.prompt_token_ids.extend(output.prompt_token_ids)
    response.prompt_logprobs.extend(_messages(output.prompt_logprobs))


def _add_end(
    response: generation_pb2.GenerateStreamResponse | generation_pb2.Completion,
    output: CandidateOutput,
) -> None:
    response.finish_reason = _FINISH_REASONS[output.finish_reason or ""]
    if isinstance(output.matched_stop, str):
        response.matched_stop.text = output.matched_stop
    elif output.matched_stop is not None:
        response.matched_stop.token_id = output.matched_stop
    if output.score is not None:
        response.score = output.score


def usage_to_proto(counts: TokenCounts) -> common_pb2.Usage:
    """The message with token counts."""
    return common_pb2.Usage(
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        completion_tokens=counts.completion_tokens,
        accepted_prediction_tokens=counts.accepted_prediction_tokens,
        rejected_prediction_tokens=counts.rejected_prediction_tokens,
    )


def _messages(logprobs: Sequence[TokenLogprobs]) -> Iterable[common_pb2.TokenLogprobs]:
    """Log-probabilities of a worker, which are messages as they came."""
    return cast("Iterable[common_pb2.TokenLogprobs]", logprobs)


def _timings(timings: Timings) -> common_pb2.Timings:
    return common_pb2.Timings(**{stage: getattr(timings, stage) for stage in STAGES})
