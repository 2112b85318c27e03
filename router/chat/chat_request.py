"""The chat protocols' common form: `ChatRequest` in, `ChatChunk` out.

OpenAI's chat and responses APIs and Anthropic's messages API are conversions to and from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.v1 import common_pb2
from router.chat.conversation import Conversation
from router.chat.delta import ChatDelta

__all__ = ["ChatChunk", "ChatRequest", "ChatUsage"]


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
        request_id: names the request; empty: it gets one.
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
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class ChatUsage:
    """Token counts. `reasoning_tokens` of the completion's tokens are of its reasoning part.

    `predicted` has the draft tokens of workers that were right, and those that were wrong.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    predicted: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """The addition of one candidate's next tokens to its answer.

    Attributes:
        index: the candidate's number, from 0.
        delta: the new text.
        token_ids: the new tokens.
        logprobs: one per token; empty if the request does not ask for them.
        finish_reason: "stop", "length", "tool_calls" or "abort"; on the candidate's last chunk.
        matched_stop: the stop text or token that ended it; on the candidate's last chunk.
        usage: token counts; on the last chunk of all.
        prompt_usage: those of the prompt; on the first chunk of all.
    """

    index: int
    delta: ChatDelta
    token_ids: Sequence[int] = ()
    logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    usage: ChatUsage | None = None
    prompt_usage: ChatUsage | None = None
