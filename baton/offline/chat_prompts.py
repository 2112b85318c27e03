"""`ChatPrompts`: from the messages of a chat to a prompt, with the model's chat template."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from baton.common.errors import FailedPreconditionError
from baton.common.request.prompts import ParsedPrompt
from router.chat.messages import conversation_of
from router.chat.template import ChatTemplate

__all__ = ["ChatPrompts", "as_conversations"]

_MAX_TEMPLATES = 8


class ChatPrompts:
    """The chat templates of one model; they are read with the first chat.

    Args:
        model: checkpoint folder or Hub name.
        chat_template: the path or the text of a template instead of the model's; None: its own.

    Raises:
        ConfigurationError: `chat_template` cannot be read or compiled.
    """

    def __init__(self, model: str, chat_template: str | None = None) -> None:
        self._model = model
        self._chat_template = chat_template
        self._load = lru_cache(_MAX_TEMPLATES)(ChatTemplate.load)
        if chat_template is not None:
            self._load(model, chat_template)

    def render(
        self, messages: Any, *, chat_template: str | None = None, **options: Any
    ) -> ParsedPrompt:
        """Returns the prompt of a chat, whose special tokens the template writes.

        Args:
            messages: as in OpenAI's chat API.
            chat_template: the path or the text of a template for this chat.
            options: those of `router.chat.messages.conversation_of`.

        Raises:
            ConfigurationError: `chat_template` cannot be read or compiled.
            FailedPreconditionError: the model has no chat template.
            InvalidArgumentError: a message is malformed, or the template refuses it.
        """
        template = self._load(self._model, chat_template or self._chat_template)
        if template is None:
            raise FailedPreconditionError(
                f"{self._model} has no chat template; set chat_template to one"
            )
        text = template.render(conversation_of(messages, **options))
        return ParsedPrompt(text=text, add_special_tokens=False)


def as_conversations(messages: Any) -> Sequence[Any]:
    """Returns a list of conversations; a single one becomes a list of one."""
    if not isinstance(messages, Sequence):
        return [messages]  # `conversation_of` refuses it by its name
    is_one = len(messages) == 0 or isinstance(messages[0], Mapping)
    return [messages] if is_one else messages
