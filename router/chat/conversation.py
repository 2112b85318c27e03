"""`Conversation`: a chat as a chat template reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Conversation", "content_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of a chat and how they become a prompt.

    Attributes:
        messages: messages as in OpenAI's chat API, checked and normalized.
        tools: the tools that the model may call, as in OpenAI's chat API.
        documents: documents for templates that read them.
        add_generation_prompt: whether the prompt ends with the start of an answer.
        continue_final_message: whether the answer continues the text of the last message.
        template_kwargs: further variables of the template (`chat_template_kwargs`).
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def content_text(content: Any, separator: str = "") -> str:
    """Returns the text of a message's content: a text, a list of text parts, or None."""
    if content is None or isinstance(content, str):
        return content or ""
    return separator.join(part["text"] for part in content)
