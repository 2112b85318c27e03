"""`/v1/chat/completions`: OpenAI's chat completions, with vLLM's further fields."""

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from baton.common.request.answer import (
    CandidateOutput,
    ChatDelta,
    JoinedAnswer,
    JoinedCandidate,
    TokenCounts,
    ToolCallDelta,
)
from router.chat.chat_request import ChatRequest, Conversation, content_text
from router.chat.output import ToolCall, whole_answer
from router.chat_service import ChatService
from router.http.answering import job_response
from router.http.body_route import BodyRoute, convert_body
from router.http.endpoints import COMPLETION_FIELDS, EndpointGroup, context_of, declared_responses
from router.http.json_bytes import event, text_json
from router.http.logprobs import chat_logprobs, num_logprob_bytes
from router.http.openai_bodies import ChatBody
from router.http.params import request_id_of, timeout_of
from router.http.sse import DONE, Emit
from router.http.token_texts import TokenTexts
from router.http.usage import usage_fields
from router.requests.input_threads import convert_input

__all__ = ["ENDPOINTS", "ChatJob", "read_chat_request"]

_ROUTER = APIRouter(route_class=BodyRoute)
ENDPOINTS = EndpointGroup(_ROUTER)


@_ROUTER.post(
    "/v1/chat/completions",
    responses=declared_responses("The answer.", *COMPLETION_FIELDS, streams=True),
)
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answers a chat."""
    context = context_of(request)
    model = context.models.find(body.model or "")
    request_id = request_id_of(request, body)
    chat_request = await convert_body(request, read_chat_request, body, request_id)
    body.drop_ignored()
    job = ChatJob(
        body,
        chat_request,
        context.chat(model),
        context.token_texts(model),
        model_name=body.model or model.name,
        timeout_s=timeout_of(request),
    )
    return await job_response(job, request, request_id, streams=body.stream)


def read_chat_request(body: ChatBody, request_id: str) -> ChatRequest:
    """The chat that a body states.

    Raises:
        InvalidArgumentError: a field is malformed; names it.
    """
    return ChatRequest(
        conversation=body.conversation(),
        params=body.stated(),
        tool_choice=body.forced_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        schema_fields=body.schema_fields,
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        add_special_tokens=bool(body.add_special_tokens),
    )


class ChatJob:
    """One chat, answered whole or as a stream.

    Args:
        body: the client's.
        request: the chat.
        service: answers it.
        texts: the texts of the model's tokens.
        model_name: as the client wrote it.
        timeout_s: seconds until the client's deadline; None if it states none.

    Attributes:
        num_logprob_bytes: about how many bytes the log-probabilities of a whole answer take.
    """

    def __init__(
        self,
        body: ChatBody,
        request: ChatRequest,
        service: ChatService,
        texts: TokenTexts,
        *,
        model_name: str,
        timeout_s: float | None,
    ) -> None:
        self.num_logprob_bytes = 0
        self._body = body
        self._request = request
        self._service = service
        self._texts = texts
        self._timeout_s = timeout_s
        self._id = f"chatcmpl-{request.request_id}"
        self._model_name = model_name
        self._created = int(time.time())
        self._echoed = _echoed(body, request.conversation)
        self._begun: set[int] = set()
        self._num_generated = 0
        self._prompt_ids: Sequence[int] | None = None

    async def whole(self) -> dict[str, Any]:
        """The answer with all choices."""
        await self._encode_prompt(is_needed=bool(self._body.return_token_ids))
        answer = JoinedAnswer()
        async with aclosing(self._service.stream(self._request, self._timeout_s)) as outputs:
            async for output in outputs:
                answer.add(output)
        candidates = answer.candidates
        logprobs = (num_logprob_bytes(candidate.logprobs) for candidate in candidates)
        self.num_logprob_bytes = sum(logprobs)
        choices = await convert_input(
            self.num_logprob_bytes, lambda: list(map(self._choice, candidates))
        )
        fields = self._head("chat.completion") | {
            "choices": choices,
            "usage": usage_fields(answer.last.usage or TokenCounts(), has_reasoning=True),
        }
        return fields | self._prompt_fields()

    async def stream(self, emit: Emit) -> None:
        """Writes the answer's deltas as they come: the role first, then text."""
        body = self._body
        needs_prompt = body.counts_continuously or bool(body.return_token_ids)
        await self._encode_prompt(is_needed=needs_prompt)
        head = self._head("chat.completion.chunk")
        before, later = _before_choice(head | self._prompt_fields()), _before_choice(head)
        usage: TokenCounts | None = None
        async with aclosing(self._service.stream(self._request, self._timeout_s)) as outputs:
            async for output in outputs:
                usage = output.usage or usage
                self._num_generated += len(output.token_ids)
                after = self._chunk_end()
                choices = [*self._role(output.index), *self._choice_delta(output)]
                if choices:
                    events = f"{after}{later}".join(choices)
                    await emit(f"{before}{events}{after}".encode())
                    before = later
        end = b""
        if body.includes_usage and usage is not None:
            counts = usage_fields(usage, has_reasoning=True)
            end = event({**head, "choices": [], "usage": counts})
        await emit(end + DONE)

    async def _encode_prompt(self, *, is_needed: bool) -> None:
        if is_needed:
            self._prompt_ids = await self._service.encode(
                self._request.conversation, add_special_tokens=self._request.add_special_tokens
            )

    def _prompt_fields(self) -> dict[str, Any]:
        """The tokens of the prompt, if the answer includes them."""
        if not self._body.return_token_ids or self._prompt_ids is None:
            return {}
        return {"prompt_token_ids": list(self._prompt_ids)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model_name,
        }

    def _chunk_end(self) -> str:
        """Returns the text after the choice in a chunk."""
        if not self._body.includes_usage:
            return "]}\n\n"
        if not self._body.counts_continuously or self._prompt_ids is None:
            return '],"usage":null}\n\n'
        counts = TokenCounts(len(self._prompt_ids), completion_tokens=self._num_generated)
        usage = text_json(usage_fields(counts, has_cached=False))
        return f'],"usage":{usage}}}\n\n'

    def _role(self, index: int) -> list[str]:
        """The first choice of a candidate's chunks, if it is to come now."""
        if index in self._begun:
            return []
        self._begun.add(index)
        delta = {"role": "assistant", "content": self._echoed}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [text_json(choice)]

    def _choice_delta(self, output: CandidateOutput) -> list[str]:
        """The choice of an output; none if it would say nothing."""
        delta = output.delta
        has_tokens = bool(output.token_ids) and bool(self._body.return_token_ids)
        if output.finish_reason is None and not output.logprobs and not has_tokens:
            if delta.content and not delta.reasoning and not delta.tool_calls:
                # Most chunks have text alone; this costs less than the general form below.
                text = text_json(delta.content)
                return [
                    f'{{"index":{output.index},"delta":{{"content":{text}}},'
                    f'"logprobs":null,"finish_reason":null}}'
                ]
            if not self._delta_fields(delta):
                return []
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": self._delta_fields(delta) or _empty_delta(output),
            "logprobs": self._logprobs(output.token_ids, output),
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.matched_stop
        if has_tokens:
            choice["token_ids"] = list(output.token_ids)
        return [text_json(choice)]

    def _delta_fields(self, delta: ChatDelta) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if delta.reasoning and self._body.include_reasoning is not False:
            fields |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
        if delta.content:
            fields["content"] = delta.content
        if delta.tool_calls:
            fields["tool_calls"] = list(map(_call_delta, delta.tool_calls))
        return fields

    def _choice(self, candidate: JoinedCandidate) -> dict[str, Any]:
        parts = whole_answer(candidate.deltas)
        reasoning = None if self._body.include_reasoning is False else parts.reasoning
        content = parts.content
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._echoed + (content or "") if self._echoed else content,
            "refusal": None,
            "reasoning": reasoning,
            "reasoning_content": reasoning,
        }
        if parts.tool_calls:
            message["tool_calls"] = list(map(_whole_call, parts.tool_calls))
        choice: dict[str, Any] = {
            "index": candidate.index,
            "message": message,
            "logprobs": self._logprobs(candidate.token_ids, candidate),
            "finish_reason": candidate.last.finish_reason,
            "stop_reason": candidate.last.matched_stop,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = candidate.token_ids
        return choice

    def _logprobs(
        self, token_ids: Sequence[int], source: CandidateOutput | JoinedCandidate
    ) -> dict[str, Any] | None:
        if not source.logprobs:
            return None
        return chat_logprobs(
            self._texts,
            token_ids,
            source.logprobs,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )


def _empty_delta(output: CandidateOutput) -> dict[str, Any]:
    """The delta of an output without text. Tokens without text, such as that of the end, are empty
    content, as in vLLM: `vllm bench serve` counts an answer whose deltas have no content as failed.
    """
    return {"content": ""} if output.token_ids else {}


def _before_choice(head: Mapping[str, Any]) -> str:
    """Returns the text before the choice in a chunk."""
    return f'data: {text_json(head)[:-1]},"choices":['


def _echoed(body: ChatBody, conversation: Conversation) -> str:
    """The text of a final message of the assistant, if the answer is to begin with it."""
    last = conversation.messages[-1]
    if not body.echo or last.get("role") != "assistant":
        return ""
    return content_text(last.get("content"))


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """A call's delta; id, type and name come with its first one."""
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


def _whole_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
