"""`GenerationRequest`: prompts to complete, before the model's defaults and limits apply.

The HTTP front and the gRPC servicer make one per call, `LLM` one per prompt. The sampling
parameters that the client leaves out take the model's defaults, which is why it has the stated ones
alone.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.common.request.request_spec import ReasoningStart

__all__ = ["GenerationRequest", "TextOrTokens", "new_request_id"]

TextOrTokens = str | Sequence[int]
"""A prompt: a text, or token ids."""


def new_request_id() -> str:
    """A name for a request whose client gives it none."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Prompts to complete with the same parameters.

    Attributes:
        prompts: the prompts; not copied.
        stated: the stated fields of `SamplingParams`, by name; others take the model's defaults.
        has_several: whether the prompts are a list, of one or more. Prompt i then runs under the
            request's id, "-" and i.
        request_id: names the request.
        priority: lower is scheduled first.
        cache_salt: separates prefix caches.
        add_special_tokens: whether the tokenizer adds the model's special tokens to texts.
        reasoning_start: where the completion begins, relative to its reasoning part.
    """

    prompts: Sequence[TextOrTokens]
    stated: Mapping[str, Any] = field(default_factory=dict)
    has_several: bool = False
    request_id: str = field(default_factory=new_request_id)
    priority: int = 0
    cache_salt: str = ""
    add_special_tokens: bool = True
    reasoning_start: ReasoningStart = ReasoningStart.BY_PROMPT
