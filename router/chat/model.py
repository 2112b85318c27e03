"""`ChatModel`: a model's chat template, its parsers and the tags of its reasoning part."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from baton.common.errors import FailedPreconditionError, Reason
from baton.common.request.request_spec import ReasoningMarks, ReasoningStart
from router.chat.chat_request import Conversation, content_text
from router.chat.message_form import with_written_calls
from router.chat.reasoning_parsers import (
    MarkedReasoningParser,
    ReasoningParser,
    reasoning_parser,
)
from router.chat.template import ChatTemplate, ends_in_reasoning
from router.chat.tool_parsers import ToolParser, tool_parser
from router.config.served_model import ServedModelConfig
from router.requests.reasoning import encode_marks
from router.requests.tokenizer import Tokenizer

__all__ = ["ChatModel"]


class ChatModel:
    """The chats of a model.

    Args:
        config: the model's.
        template: its chat template; None if it has none.
        tokenizer: its tokenizer.
        turn: waits until a chat may be rendered.

    Attributes:
        template: its chat template; None if it has none.
        tool_parser: reads tool calls in its answers; None if its format is not known.
        reasoning_parser: reads the reasoning part of its answers; None if they have none.
        reasoning_marks: the tags of that part; None if they are not known.

    Raises:
        ConfigurationError: a parser is unknown, or the tags of the reasoning part are bad.
    """

    def __init__(
        self,
        config: ServedModelConfig,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        turn: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        self._name = config.names[0]
        self.template = template
        self._turn = turn
        tools, reasoning = config.tool_call_parser, config.reasoning_parser
        self.tool_parser: type[ToolParser] | None = tool_parser(tools) if tools else None
        self.reasoning_parser: type[ReasoningParser] | None = (
            reasoning_parser(reasoning) if reasoning else None
        )
        self._mark_texts = _mark_texts(config, self.reasoning_parser)
        self.reasoning_marks: ReasoningMarks | None = encode_marks(tokenizer, *self._mark_texts)

    async def render(self, conversation: Conversation) -> str:
        """Returns the prompt of a chat. It has its special tokens already, as texts.

        If the template leaves out the calls of earlier answers, they are text of these answers, as
        the model wrote them.

        Raises:
            FailedPreconditionError: the model has no chat template.
            InvalidArgumentError: the template cannot render the chat; names the field.
            ResourceExhaustedError: too many chats wait for their template.
        """
        if self.template is None:
            raise FailedPreconditionError(
                f"model {self._name!r} has no chat template; the operator can set --chat-template",
                reason=Reason.NOT_CONFIGURED,
                field="chat",
            )
        async with self._turn():
            return await asyncio.to_thread(self._render, self.template, conversation)

    def _render(self, template: ChatTemplate, conversation: Conversation) -> str:
        if self.tool_parser is not None and not template.writes_calls(conversation):
            messages = with_written_calls(conversation.messages, self.tool_parser.write_calls)
            conversation = replace(conversation, messages=messages)
        return template.render(conversation)

    def reasoning_start(self, conversation: Conversation, prompt: str) -> ReasoningStart:
        """Returns where the answer to a chat begins. Only the end of the prompt decides it, which
        the template and the final message write: other messages may contain the tags as plain
        text.
        """
        start, end = self._mark_texts
        if start is None or end is None:
            return ReasoningStart.BY_PROMPT
        prefill = ""
        if conversation.continue_final_message:
            prefill = content_text(conversation.messages[-1].get("content"))
        if ends_in_reasoning(prompt, start, end, prefill):
            return ReasoningStart.INSIDE
        is_over = end in prefill or prompt.rstrip().endswith(end)
        return ReasoningStart.AFTER if is_over else ReasoningStart.BEFORE


def _mark_texts(
    config: ServedModelConfig, parser: type[ReasoningParser] | None
) -> tuple[str | None, str | None]:
    """The tags that flags state, or those of the reasoning parser."""
    start, end = config.reasoning_start_str, config.reasoning_end_str
    if start is end is None and parser and issubclass(parser, MarkedReasoningParser):
        start, end = parser.start, parser.end
    return start, end
