"""Prompts as users give them: texts, token ids, and vLLM's dictionaries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import NoneType
from typing import Any, NotRequired, TypedDict

from baton.common.errors import InvalidArgumentError
from baton.common.short_texts import short_repr

__all__ = [
    "ParsedPrompt",
    "Prompt",
    "TextPrompt",
    "TokensPrompt",
    "is_single",
    "parse_prompt",
    "parse_prompts",
    "refuse_lora",
]


class TextPrompt(TypedDict):
    """A text with options: `cache_salt` separates prefix caches."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids with options: `prompt` is their text, which results then have."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""One prompt."""

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """One prompt; `text` or `token_ids` is set.

    Attributes:
        text: the text.
        token_ids: the tokens; they win over `text`.
        cache_salt: separates prefix caches.
        add_special_tokens: whether the tokenizer adds its special tokens to `text`.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    cache_salt: str = ""
    add_special_tokens: bool = True


def is_single(prompts: Any) -> bool:
    """Whether the value is one prompt: a text, a dictionary, or a list of token ids."""
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__getitem__"):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], Integral)


def parse_prompts(prompts: Any) -> list[ParsedPrompt]:
    """Returns the prompts of a `Prompt` or a list of them; a single one becomes a list of one.

    Raises:
        InvalidArgumentError: a prompt is of another kind, or a dictionary has a key that Baton
            does not know; names it.
    """
    return [parse_prompt(prompt) for prompt in ([prompts] if is_single(prompts) else prompts)]


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Returns one prompt of the kinds of `Prompt`.

    Raises:
        InvalidArgumentError: as `parse_prompts`.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if not hasattr(prompt, "__getitem__") or isinstance(prompt, bytes):
        limit = "a text, a list of token ids or a dictionary of one of them"
        raise InvalidArgumentError.for_field("prompt", prompt, limit)
    return ParsedPrompt(token_ids=prompt)


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key, value in prompt.items():
        if key not in _KEYS and value:
            raise InvalidArgumentError(
                f"a prompt has the key {short_repr(key)}; known are {', '.join(_KEYS)}"
            )
    for key in ("prompt", "cache_salt"):
        if not isinstance(prompt.get(key), str | NoneType):
            raise InvalidArgumentError.for_field(key, prompt[key], "a text")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise InvalidArgumentError("a prompt has neither 'prompt' nor 'prompt_token_ids'; set one")
    return ParsedPrompt(text, token_ids, prompt.get("cache_salt") or "")


def refuse_lora(lora_request: object) -> None:
    """Refuses vLLM's `lora_request`.

    Raises:
        InvalidArgumentError: it is set.
    """
    if lora_request is not None:
        raise InvalidArgumentError("lora_request is set; adapters are not supported")
