"""`ChatRequest`: the chat protocols' common form of a request. `Conversation`: its messages.

OpenAI's chat and responses APIs and Anthropic's messages API are conversions to it, and from the
`CandidateOutput` of its answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.common.request.generation import new_request_id

__all__ = ["ChatRequest", "Conversation", "content_text"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat to answer.

    Attributes:
        conversation: the messages.
        params: the stated fields of `SamplingParams`, by name; others take the model's defaults.
        tool_choice: as in OpenAI's chat API: none, auto, required, or an object that names a
            function. None: auto if there are tools.
        parallel_tool_calls: whether the answer may have several calls.
        schema_fields: the client's fields of the tools' schemas, for errors; empty: those of
            OpenAI's chat API.
        request_id: names the request.
        priority: lower is scheduled first.
        cache_salt: separates prefix caches.
        add_special_tokens: whether the tokenizer adds the model's special tokens to the prompt.
            Most templates write them.
    """

    conversation: Conversation
    params: Mapping[str, Any] = field(default_factory=dict)
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    schema_fields: Sequence[str] = ()
    request_id: str = field(default_factory=new_request_id)
    priority: int = 0
    cache_salt: str = ""
    add_special_tokens: bool = False
