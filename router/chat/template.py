"""`ChatTemplate`: turns a chat into a prompt, as the model's checkpoint says.

Equal to `apply_chat_template` of `transformers`, without importing it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import jinja2

from baton.common.errors import ConfigurationError, InvalidArgumentError
from router.chat.chat_request import Conversation
from router.chat.jinja_environment import RefusedByTemplateError, build_environment, plain_copy
from router.chat.message_form import (
    REASONING_FIELDS,
    FinalMessage,
    MessageForm,
    find_form,
    shape_messages,
)
from router.chat.template_source import (
    TemplateSource,
    TemplateText,
    find_templates,
    read_override,
)

__all__ = ["MAX_PROMPT_CHARS", "ChatTemplate", "ends_in_reasoning"]

logger = logging.getLogger(__name__)

MAX_PROMPT_CHARS = 4 << 20
"""The most characters of a rendered prompt. It is far above what a model takes, and bounds what a
template writes that repeats its input.
"""
_MAX_ERROR_CHARS = 500
_RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "conversation",
    "tokenize",
)
"""Variables and settings that `chat_template_kwargs` must not contain."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A template that is ready to use.

    Attributes:
        text: its source.
        code: what runs.
        form: how it reads messages.
    """

    text: str
    code: jinja2.Template
    form: MessageForm


class ChatTemplate:
    """A model's chat template, or two: one of them for chats with tools. `load` makes one.

    Attributes:
        text: of the default template.
    """

    def __init__(self, source: TemplateSource) -> None:
        """Compiles the templates.

        Args:
            source: its template "default" is needed, its template "tool_use" is for chats with
                tools; others are ignored.

        Raises:
            ConfigurationError: there is no default template, or a template has an error of
                syntax; names the file and the line.
        """
        if "default" not in source.templates:
            names = ", ".join(sorted(source.templates))
            raise ConfigurationError(
                f"the model has chat templates named {names}, but none named default; "
                "choose one with --chat-template"
            )
        self.text = source.templates["default"].text
        self._special_tokens = dict(source.special_tokens)
        self._default = _compile(source.templates["default"], self._special_tokens)
        tool_use = source.templates.get("tool_use")
        self._tool_use = _compile(tool_use, self._special_tokens) if tool_use else self._default

    @classmethod
    def load(cls, model: str, override: str | None = None) -> "ChatTemplate | None":
        """Loads the template of a model; None if the model has none.

        Args:
            model: checkpoint folder or Hub name.
            override: the path or the text of a template that replaces the model's own
                (`--chat-template`). The special tokens are the model's.

        Raises:
            ConfigurationError: the model or the file cannot be read, or the template has an
                error of syntax; names the file and the line.
        """
        source = find_templates(model)
        if override is not None:
            source = TemplateSource({"default": read_override(override)}, source.special_tokens)
        return cls(source) if source.templates else None

    def render(self, conversation: Conversation) -> str:
        """Returns the prompt of a chat. It has its special tokens already, as texts.

        Takes time in proportion to the chat's length, and can run in any thread.

        Raises:
            InvalidArgumentError: a field is not JSON data or has a lone surrogate, a template
                variable is reserved, the template refuses the messages or cannot render them,
                the final message cannot be continued, or the prompt is too long; names the
                field.
        """
        _check(conversation)
        template = self._template_for(conversation)
        variables = self._special_tokens | plain_copy(
            "chat_template_kwargs", conversation.template_kwargs
        )
        messages = self.messages_for(conversation)
        final = None
        if conversation.continue_final_message:
            final = FinalMessage.mark(messages, template.text)
        variables |= {
            "messages": messages,
            "tools": _list_or_none("tools", conversation.tools),
            "documents": _list_or_none("documents", conversation.documents),
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        prompt = _joined(_pieces(template.code, variables))
        return final.cut(prompt) if final else prompt

    def writes_calls(self, conversation: Conversation) -> bool:
        """Returns whether the template writes the calls of messages, or leaves them out."""
        return self._template_for(conversation).form.has_calls

    def messages_for(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Returns a copy of the messages in the form that the template reads.

        Raises:
            InvalidArgumentError: a message is not JSON data or has a lone surrogate.
        """
        stated = map(_without_unset, plain_copy("messages", conversation.messages))
        return shape_messages(list(stated), self._template_for(conversation).form)

    def _template_for(self, conversation: Conversation) -> _Compiled:
        return self._tool_use if conversation.tools else self._default


def ends_in_reasoning(prompt: str, start_str: str, end_str: str, prefill: str = "") -> bool:
    """Whether a prompt ends inside of a reasoning part, so that the answer begins with reasoning.

    Only the prompt's end counts: the messages before it may contain the tags as plain text.

    Args:
        prompt: a rendered prompt.
        start_str: the text that starts a reasoning part.
        end_str: the text that ends it.
        prefill: the text of the final message, if the answer continues it.
    """
    if start_str in prefill or end_str in prefill:
        return prefill.rfind(start_str) > prefill.rfind(end_str)
    head = prompt.rstrip().removesuffix(prefill.rstrip())
    return head.rstrip().endswith(start_str.rstrip())


def _compile(template: TemplateText, special_tokens: Mapping[str, str]) -> _Compiled:
    environment = build_environment()
    try:
        parsed = environment.parse(template.text)
        code = environment.from_string(template.text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationError(
            f"{template.origin}, line {error.lineno}: {error.message}"
        ) from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise ConfigurationError(f"{template.origin} cannot be compiled: {error}") from error

    def render(messages: Sequence[dict[str, Any]]) -> str:
        unset = {"tools": None, "documents": None, "add_generation_prompt": True}
        return _joined(_pieces(code, {**special_tokens, **unset, "messages": messages}))

    return _Compiled(template.text, code, find_form(parsed, template.text, render))


def _check(conversation: Conversation) -> None:
    """Refuses what no template can render."""
    if not conversation.messages:
        raise InvalidArgumentError("messages is empty; a chat has at least one message")
    if conversation.continue_final_message and conversation.add_generation_prompt:
        raise InvalidArgumentError(
            "continue_final_message and add_generation_prompt are both true; a prompt either "
            "continues the final message or begins a new one"
        )
    for name in _RESERVED:
        if name in conversation.template_kwargs:
            raise InvalidArgumentError(
                f"chat_template_kwargs has the key {name!r}, which is reserved"
            )


def _without_unset(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message that are not null, its reasoning under the names that templates
    read: `reasoning_content`, and `thinking` for those of gpt-oss.
    """
    stated = {name: value for name, value in message.items() if value is not None}
    reasoning = next((stated[name] for name in REASONING_FIELDS if name in stated), None)
    if reasoning is None:
        return stated
    return {"thinking": reasoning, **stated, "reasoning_content": reasoning}


def _list_or_none(field: str, values: Sequence[Any]) -> list[Any] | None:
    return plain_copy(field, values) if values else None


def _pieces(code: jinja2.Template, variables: Mapping[str, Any]) -> Iterator[str]:
    """Yields the pieces of a prompt as the template writes them."""
    try:
        yield from code.generate(variables)
    except RefusedByTemplateError as error:
        raise InvalidArgumentError(
            f"the chat template refuses the messages: {_cut(str(error))}"
        ) from error
    except Exception as error:  # a template's operations raise anything on what a client sent
        logger.debug("a chat template failed", exc_info=True)
        raise InvalidArgumentError(
            f"the chat template cannot render the messages: line {_line_of(error)}: "
            f"{_cut(str(error))}"
        ) from error


def _line_of(error: Exception) -> int:
    """The line of the template where an error arose; Jinja writes it into the traceback."""
    lines = [
        line
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"
    ]
    return lines[-1] if lines else 0


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}..."


def _joined(pieces: Iterator[str]) -> str:
    kept = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_PROMPT_CHARS:
            raise InvalidArgumentError(
                f"the prompt of the messages has more than {MAX_PROMPT_CHARS} characters"
            )
        kept.append(piece)
    return "".join(kept)
