"""`ChatService`: answers chats over a model's pipeline. Every chat protocol uses it."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from baton.common.errors import FailedPreconditionError, InvalidArgumentError, Reason
from baton.common.request.answer import (
    NO_DELTA,
    CandidateOutput,
    TokenCounts,
    stated_stop,
)
from baton.common.request.generation import GenerationRequest
from baton.common.request.request_spec import ReasoningStart
from baton.common.request.structured_outputs import StructuredOutputs
from router.chat.call_forms import form_or_calls, strict_calls
from router.chat.chat_request import ChatRequest, Conversation, content_text
from router.chat.output import ChatOutput, join_deltas
from router.chat.reasoning_parsers import MarkedReasoningParser, ReasoningParser
from router.chat.template import ends_in_reasoning
from router.chat.tool_parsers import ToolParser, forced_tool_parser
from router.models import Model
from router.requests.validation import check_length

__all__ = ["ChatService"]


class ChatService:
    """Answers chats of one model.

    Args:
        model: the model.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    async def stream(
        self, request: ChatRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[CandidateOutput, None]:
        """Yields the outputs of an answer, with their text as deltas. The caller closes the
        generator.

        Args:
            request: the chat.
            timeout_s: seconds until the deadline; None: the router's.

        Raises:
            FailedPreconditionError: the model has no chat template, or no parser of tool calls
                although the request needs one; names the flag.
            BatonError: a field is wrong, or one of those that `GenerationService` documents.
        """
        request = _without_unused_tools(request)
        prompt = await self._model.chat.render(request.conversation)
        # A thread reads the schemas of tools, which are as large as a client likes.
        args = self._model, request, prompt
        has_tools = bool(request.conversation.tools)
        answers = await asyncio.to_thread(_Answers, *args) if has_tools else _Answers(*args)
        completion = self._completion_of(request, prompt, answers.params)
        async with self._model.outputs(completion, timeout_s, "chat") as outputs:
            async for output in outputs:
                answers.divide(output)
                if output.usage is not None:
                    await answers.count_reasoning(output.usage)
                yield output

    async def prompt_of(self, request: ChatRequest) -> GenerationRequest:
        """The request for the completion that answers a chat, without what parsers of the answer
        add to its parameters; errors are those of `stream`.
        """
        request = _without_unused_tools(request)
        prompt = await self._model.chat.render(request.conversation)
        return self._completion_of(request, prompt, request.params)

    def _completion_of(
        self, request: ChatRequest, prompt: str, stated: Mapping[str, Any]
    ) -> GenerationRequest:
        if "max_tokens" not in stated and "max_tokens" not in self._model.default_params:
            stated = {**stated, "max_tokens": None}  # an answer may be as long as fits
        return self._model.completion_of(request, prompt, stated)

    async def count_tokens(self, conversation: Conversation) -> int:
        """The number of tokens of a chat's prompt.

        Raises:
            FailedPreconditionError: the model has no chat template.
            InvalidArgumentError: the messages cannot be rendered, or are too long.
        """
        return len(await self.encode(conversation))

    async def encode(
        self, conversation: Conversation, *, add_special_tokens: bool = False
    ) -> list[int]:
        """The tokens of a chat's prompt; errors are those of `count_tokens`."""
        prompt = await self._model.chat.render(conversation)
        check_length("prompt", prompt, self._model.most_prompt_chars)
        return await self._model.encode(prompt, add_special_tokens=add_special_tokens)


class _Answers:
    """The candidates of one request, whose text becomes deltas.

    Args:
        model: the model.
        request: the chat.
        prompt: its text.

    Attributes:
        params: the stated parameters, with those that parsers and forced calls need.
    """

    def __init__(self, model: Model, request: ChatRequest, prompt: str) -> None:
        self._model = model
        self._request = request
        self._prompt = prompt
        self._outputs: dict[int, ChatOutput] = {}
        self._reasoning: list[str] = []
        self._is_formed = False  # whether all of the text behind the reasoning part has a form
        self.params = self._params()

    def divide(self, output: CandidateOutput) -> None:
        """Adds the parts of an output's text, and how its candidate ended as a chat."""
        answer = self._outputs.get(output.index)
        if answer is None:
            answer = self._outputs[output.index] = self._new_output()
        delta = answer.push(output.text) if output.text else NO_DELTA
        if output.finish_reason is not None:
            delta = join_deltas((delta, answer.finish()))
            # Calls whose arguments a stop text cut are not to be run.
            if output.finish_reason == "stop" and answer.ends_in_calls:
                output.finish_reason = "tool_calls"
            stops = self._request.params.get("stop_token_ids")
            output.matched_stop = stated_stop(output.matched_stop, stops)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        output.delta = delta

    async def count_reasoning(self, usage: TokenCounts) -> None:
        """Adds the number of tokens of the reasoning part. An output may have tokens of it and of
        the content, so its text is encoded to count them.
        """
        if self._reasoning:
            token_ids = await self._model.tokenizer.encode_async(
                "".join(self._reasoning), add_special_tokens=False
            )
            usage.reasoning_tokens = min(len(token_ids), usage.completion_tokens)

    def _new_output(self) -> ChatOutput:
        return ChatOutput(
            self._reasoning_parser(),
            self._tool_parser(),
            parallel_tool_calls=self._request.parallel_tool_calls,
        )

    def _reasoning_parser(self) -> ReasoningParser | None:
        kind = self._model.chat.reasoning_parser
        if kind is None:
            return None
        if self._is_formed:
            return self._reasoning_parser_of_form(kind)
        conversation = self._request.conversation
        if conversation.continue_final_message and issubclass(kind, MarkedReasoningParser):
            prefill = content_text(conversation.messages[-1].get("content"))
            return kind(ends_in_reasoning(self._prompt, kind.start, kind.end, prefill))
        return kind(kind.is_open_after(self._prompt))

    def _reasoning_parser_of_form(self, kind: type[ReasoningParser]) -> ReasoningParser | None:
        """The parser of an answer that must have a form.

        The form holds from the first token on, unless the prompt leaves a reasoning part open, or
        the text itself opens one, with tags that the replicas know. The parser divides the text
        as they do: none of the form is reasoning.
        """
        if self._model.chat.reasoning_marks is None:
            return None
        start = self._model.chat.reasoning_start(self._request.conversation, self._prompt)
        return None if start is ReasoningStart.AFTER else kind(start is ReasoningStart.INSIDE)

    def _tool_parser(self) -> ToolParser | None:
        """The parser of calls; None if the answer has none.

        Raises:
            FailedPreconditionError: the format of the model's calls is not known.
        """
        tools = self._request.conversation.tools
        if not tools:
            return None
        forced = forced_tool_parser(self._request.tool_choice)
        if forced is not None:
            return forced
        if self._model.chat.tool_parser is None:
            raise FailedPreconditionError(
                "tools is set, but the format of the model's tool calls is not known; the "
                "operator must set --tool-call-parser, or the request must force a call "
                "(tool_choice)",
                reason=Reason.NOT_CONFIGURED,
            )
        return self._model.chat.tool_parser(tools)

    def _params(self) -> dict[str, Any]:
        """The stated parameters, and what the parsers and calls need.

        Raises:
            InvalidArgumentError: a tool is malformed; names it.
        """
        params = dict(self._request.params)
        forced = self._forced_form()  # checks the choice, which the parser takes as it is
        tool_parser = self._tool_parser()
        form = self._form(forced, params.get("structured_outputs"), tool_parser)
        if form is not None:
            params["structured_outputs"] = form
        parsers = (self._model.chat.reasoning_parser, tool_parser)
        if any(parser is not None and parser.needs_special_tokens for parser in parsers):
            params["skip_special_tokens"] = False
        return params

    def _forced_form(self) -> StructuredOutputs | None:
        """Returns the form of a forced call; None if the choice forces none.

        Raises:
            InvalidArgumentError: the choice or a tool is malformed; names the field.
        """
        request = self._request
        return StructuredOutputs.of_tools(
            request.conversation.tools,
            request.tool_choice,
            request.parallel_tool_calls,
            request.schema_fields,
        )

    def _form(
        self,
        forced: StructuredOutputs | None,
        stated: StructuredOutputs | None,
        tool_parser: ToolParser | None,
    ) -> StructuredOutputs | None:
        """Returns the form of the text: that of a forced call, else the stated form or calls."""
        request, tools = self._request, self._request.conversation.tools
        fields, is_parallel = request.schema_fields, request.parallel_tool_calls
        self._is_formed = forced is not None or stated is not None
        if forced is not None or tool_parser is None:
            return forced or stated
        if stated is None:
            if request.params.get("beam_width") is not None:
                return None  # a beam search has no forms
            return strict_calls(tools, tool_parser.syntax, fields)
        return form_or_calls(
            stated,
            tools,
            tool_parser.syntax,
            parallel_tool_calls=is_parallel,
            schema_fields=fields,
        )


def _without_unused_tools(request: ChatRequest) -> ChatRequest:
    """The request without tools if it forbids calls: the model then does not read of them.

    Raises:
        InvalidArgumentError: `tool_choice` is unknown.
    """
    choice = request.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        limit = "none, auto, required, or an object that names a function"
        raise InvalidArgumentError.for_field("tool_choice", choice[:64], limit)
    if choice != "none" or not request.conversation.tools:
        return request
    return replace(request, conversation=replace(request.conversation, tools=()))
