"""`/v1/completions`: OpenAI's legacy completions, with vLLM's further fields."""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from baton.common.request.answer import CandidateOutput, TokenCounts, stated_stop
from baton.common.request.generation import GenerationRequest, TextOrTokens
from router.http.answering import job_response
from router.http.body_route import BodyRoute, convert_body
from router.http.endpoints import COMPLETION_FIELDS, EndpointGroup, context_of, declared_responses
from router.http.json_bytes import event, text_json
from router.http.logprobs import LegacyLogprobs, num_logprob_bytes, prompt_logprobs
from router.http.openai_bodies import CompletionBody
from router.http.params import request_id_of, timeout_of
from router.http.sse import DONE, Emit
from router.http.token_texts import TokenTexts
from router.http.usage import UsageCount, usage_fields
from router.models import Model
from router.requests.input_threads import convert_input
from router.requests.request import tokenize_prompt

__all__ = ["ENDPOINTS", "CompletionJob", "generation_request"]

_ROUTER = APIRouter(route_class=BodyRoute)
ENDPOINTS = EndpointGroup(_ROUTER)


@_ROUTER.post(
    "/v1/completions",
    responses=declared_responses("The completions.", *COMPLETION_FIELDS, streams=True),
)
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Completes one or several prompts."""
    context = context_of(request)
    model = context.models.find(body.model or "")
    request_id = request_id_of(request, body)
    timeout_s = timeout_of(request)
    prompt_ids = await _prompt_ids(body, model, timeout_s)
    texts = context.token_texts(model)
    job = await convert_body(
        request, CompletionJob, body, model, texts, request_id, prompt_ids, timeout_s=timeout_s
    )
    body.drop_ignored()
    return await job_response(job, request, request_id, streams=body.stream)


async def _prompt_ids(
    body: CompletionBody, model: Model, timeout_s: float | None
) -> Sequence[Sequence[int]] | None:
    """The tokens of the prompts; None if the answer does not need them.

    Raises:
        BatonError: a prompt is wrong, or the model is not ready.
    """
    if not body.return_token_ids and not (body.stream and body.counts_continuously):
        return None
    limits = await model.wait_for_limits(body.priority or 0, timeout_s)
    return [
        await tokenize_prompt(
            prompt,
            model.tokenizer,
            limits,
            body.truncate_prompt_tokens,
            add_special_tokens=body.add_special_tokens is not False,
        )
        for prompt in body.prompts()
    ]


def generation_request(
    body: CompletionBody, prompts: Sequence[TextOrTokens], request_id: str
) -> GenerationRequest:
    """The request that a body states.

    Args:
        body: the body.
        prompts: its prompts, or their tokens.
        request_id: names the request.

    Raises:
        InvalidArgumentError: a field is malformed; names it.
    """
    return GenerationRequest(
        prompts=prompts,
        stated=body.stated(),
        has_several=len(prompts) > 1,
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        add_special_tokens=body.add_special_tokens is not False,
    )


class CompletionJob:
    """One request for completions; its parts are the choices' pieces, streamed or joined.

    Args:
        body: the request.
        model: the model.
        texts: the texts of its tokens.
        request_id: names the request.
        prompt_ids: the prompts' tokens; None if no answer needs them.
        timeout_s: seconds until the client's deadline; None if it states none.

    Attributes:
        num_logprob_bytes: about how many bytes its log-probabilities take that are not sent.
    """

    def __init__(
        self,
        body: CompletionBody,
        model: Model,
        texts: TokenTexts,
        request_id: str,
        prompt_ids: Sequence[Sequence[int]] | None,
        *,
        timeout_s: float | None,
    ) -> None:
        self.num_logprob_bytes = 0
        self._timeout_s = timeout_s
        self._body = body
        self._model = model
        self._texts = texts
        self._prompts = body.prompts()
        self._prompt_ids = prompt_ids
        self._num_choices = 1 if body.n is None else body.n
        self._returns_text = not body.is_echo_alone
        self._is_plain = not (
            body.echo
            or body.return_token_ids
            or body.counts_continuously
            or body.logprobs is not None
            or body.prompt_logprobs is not None
        )
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._first_outputs: dict[int, CandidateOutput] = {}
        self._usage = UsageCount(self._returns_text)
        self._num_generated = 0
        self._request = generation_request(body, prompt_ids or self._prompts, request_id)
        self._head: dict[str, Any] = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or model.name,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer with all choices."""
        choices: dict[int, dict[str, Any]] = {}
        async with self._model.outputs(self._request, self._timeout_s) as outputs:
            async for output in outputs:
                part = await self._part_of(output)
                _join(choices.setdefault(part["index"], {}), part)
        ordered = [choices[index] for index in sorted(choices)]
        return {**self._head, "choices": ordered, "usage": self._usage.fields()}

    async def stream(self, emit: Emit) -> None:
        """Writes the choices' pieces as they come."""
        before, after = self._chunk_frame()
        async with self._model.outputs(self._request, self._timeout_s) as outputs:
            async for output in outputs:
                if not self._is_plain:
                    part = await self._part_of(output)
                    usage = self._usage_so_far()
                    value = {**self._head, "choices": [part], **usage}
                    await emit(await convert_input(self.num_logprob_bytes, event, value))
                    self.num_logprob_bytes = 0
                elif output.finish_reason or output.text:
                    plain = self._plain_part(output)
                    await emit(f"{before}{plain}{after}".encode())
        end = b""
        if self._body.includes_usage:
            end = event({**self._head, "choices": [], "usage": self._usage.fields()})
        await emit(end + DONE)

    def _chunk_frame(self) -> tuple[str, str]:
        """The text before and after the choice in each chunk."""
        usage = ',"usage":null' if self._body.includes_usage else ""
        return f'data: {text_json(self._head)[:-1]},"choices":[', f"]{usage}}}\n\n"

    def _plain_part(self, output: CandidateOutput) -> str:
        """The JSON of a part that has text alone; most outputs are written by this faster way."""
        index = output.prompt_index * self._num_choices + output.index
        text = text_json(output.text)
        if not output.finish_reason:
            return f'{{"index":{index},"text":{text},"logprobs":null,"finish_reason":null}}'
        if output.usage is not None:
            self._usage.add(output.usage)
        end = text_json({"logprobs": None, **self._end(output)})
        return f'{{"index":{index},"text":{text},{end[1:]}'

    async def _part_of(self, output: CandidateOutput) -> dict[str, Any]:
        """Returns the addition of an output to its choice; a thread makes many logprobs."""
        num_bytes = num_logprob_bytes(output.logprobs) + num_logprob_bytes(output.prompt_logprobs)
        self.num_logprob_bytes += num_bytes
        return await convert_input(num_bytes, self._part, output)

    def _part(self, output: CandidateOutput) -> dict[str, Any]:
        """Returns the addition of an output to its choice."""
        key = output.prompt_index, output.index
        self._first_outputs.setdefault(output.prompt_index, output)
        if output.usage is not None:
            self._usage.add(output.usage)
        part: dict[str, Any] = {
            "index": output.prompt_index * self._num_choices + output.index,
            "text": "",
            "logprobs": None,
            **self._end(output),
        }
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = _Choice(self._body, self._texts)
            self._add_prompt(choice, part, output.prompt_index)
        if self._returns_text:
            self._num_generated += len(output.token_ids)
            choice.add_tokens(part, output)
        return part

    def _end(self, output: CandidateOutput) -> dict[str, Any]:
        """How the choice ended; nulls if it has not."""
        return {
            "finish_reason": output.finish_reason,
            "stop_reason": stated_stop(output.matched_stop, self._body.stop_token_ids),
        }

    def _add_prompt(self, choice: "_Choice", part: dict[str, Any], prompt_index: int) -> None:
        """Adds what the first piece of a choice has of the prompt."""
        first = self._first_outputs[prompt_index]
        if self._body.echo:
            choice.add_prompt(part, first, self._echoed(prompt_index))
        if self._body.prompt_logprobs is not None and first.prompt_token_ids:
            part["prompt_logprobs"] = prompt_logprobs(
                self._texts, first.prompt_token_ids, first.prompt_logprobs
            )
        if self._body.return_token_ids and self._prompt_ids is not None:
            part["prompt_token_ids"] = list(self._prompt_ids[prompt_index])

    def _echoed(self, prompt_index: int) -> str:
        prompt = self._prompts[prompt_index]
        return prompt if isinstance(prompt, str) else self._model.tokenizer.decode(prompt)

    def _usage_so_far(self) -> dict[str, Any]:
        if not self._body.includes_usage:
            return {}
        if not self._body.counts_continuously or self._prompt_ids is None:
            return {"usage": None}
        num_prompt_tokens = sum(map(len, self._prompt_ids))
        counts = TokenCounts(num_prompt_tokens, completion_tokens=self._num_generated)
        return {"usage": usage_fields(counts, has_cached=False)}


class _Choice:
    """The pieces of one choice that are more than text.

    Args:
        body: the request.
        texts: the texts of the model's tokens.
    """

    def __init__(self, body: CompletionBody, texts: TokenTexts) -> None:
        self._body = body
        self._logprobs = LegacyLogprobs(
            texts,
            as_ids=bool(body.return_tokens_as_token_ids),
            has_special=body.skip_special_tokens is False,
        )

    def add_prompt(self, part: dict[str, Any], first: CandidateOutput, text: str) -> None:
        """Adds the prompt's text and the log-probabilities of its tokens."""
        part["text"] = text
        if self._body.logprobs is not None and first.prompt_token_ids:
            part["logprobs"] = self._logprobs.prompt_fields(
                first.prompt_token_ids, first.prompt_logprobs, text
            )

    def add_tokens(self, part: dict[str, Any], output: CandidateOutput) -> None:
        """Adds the text and the tokens of an output."""
        part["text"] += output.text
        if self._body.return_token_ids:
            part["token_ids"] = list(output.token_ids)
        if self._body.logprobs is not None and output.token_ids:
            fields = self._logprobs.fields(output.token_ids, output.logprobs)
            if part["logprobs"] is None:
                part["logprobs"] = fields
            else:
                _extend(part["logprobs"], fields)


def _join(choice: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds a part to a choice."""
    if not choice:
        choice.update(part)
        return
    choice["text"] += part["text"]
    choice["finish_reason"] = part["finish_reason"]
    choice["stop_reason"] = part["stop_reason"]
    if "token_ids" in part:
        choice["token_ids"] += part["token_ids"]
    if part["logprobs"] is not None:
        if choice["logprobs"] is None:
            choice["logprobs"] = part["logprobs"]
        else:
            _extend(choice["logprobs"], part["logprobs"])


def _extend(lists: dict[str, list[Any]], further: dict[str, list[Any]]) -> None:
    for name, values in further.items():
        lists[name].extend(values)
