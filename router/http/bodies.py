"""`SamplingBody`: the fields that request bodies of several protocols share.

Types are strict: a number is not a text. An explicit null is the same as an absent field.
Names follow OpenAI's API, then vLLM's. A body has few errors, however large it is: a list is
refused at its first wrong element, objects have few fields, or fields of any kind.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from baton.errors import InvalidArgumentError

__all__ = [
    "Array",
    "Body",
    "FewEntries",
    "JsonObject",
    "SamplingBody",
    "StreamOptions",
    "TokenId",
    "refuse_lacking",
]

_LOGGER = logging.getLogger("baton.http")

_MOST_ENTRIES = 1024
_Element = TypeVar("_Element")


def _refuse_many(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MOST_ENTRIES:
        raise PydanticCustomError(
            "too_many_fields",
            "Object has {length} fields; at most {most} are allowed",
            {"length": len(value), "most": _MOST_ENTRIES},
        )
    return value


TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Array = Annotated[list[_Element], Field(fail_fast=True)]
"""A list with one error at most."""
JsonObject = dict[Any, Any]
"""A JSON object. Its keys are not checked here, which would give an error for each."""
FewEntries = BeforeValidator(_refuse_many)
"""Refuses an object of many fields before each of them is checked."""

_LACKING: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "suffix": ("",),
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "prompt_embeds": (),
        "logits_processors": ([],),
        "chat_template": (),
        "typical_p": (1, 0),
        "top_a": (0,),
        "tfs": (1,),
        "mirostat_mode": (0,),
        "no_repeat_ngram_size": (0,),
    }
)
"""Features of other servers that change the answer, with the values that ask for nothing."""
_WHY = {"chat_template": "only the operator sets one (--chat-template)"}
_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
    }
)
"""Names of OpenAI's API that have no meaning here."""


class Body(BaseModel):
    """A body of a request, with few fields."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_many_fields(cls, fields: Any) -> Any:
        return _refuse_many(fields)


class StreamOptions(Body):
    """What a stream has besides the text.

    Attributes:
        include_usage: a last chunk with token counts.
        continuous_usage_stats: token counts so far in every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """The sampling parameters of a body; docs/sampling.md describes them."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    stop: str | Array[str] | None = None
    stop_token_ids: Array[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, FewEntries] = None
    allowed_token_ids: Array[int] | None = None
    bad_words: Array[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    thinking_token_budget: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    guided_json: str | JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: Array[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    vllm_xargs: JsonObject | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    cache_salt: str | None = None
    request_id: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_continuously(self) -> bool:
        """Whether every chunk of a stream has token counts."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    def drop_ignored(self) -> None:
        """Frees the values of fields without a meaning here. Called once all others are read: a
        body lives as long as its answer.
        """
        (self.model_extra or {}).clear()


def refuse_lacking(body: SamplingBody) -> None:
    """Refuses fields of features that this server lacks; logs the names that it ignores.

    Raises:
        InvalidArgumentError: names the field.
    """
    unknown = []
    for name, value in (body.model_extra or {}).items():
        if value is None or name in _IGNORED:
            continue
        if name not in _LACKING:
            unknown.append(name[:64])
        elif value not in _LACKING[name]:
            why = _WHY.get(name, "this server does not support it")
            raise InvalidArgumentError(f"{name} is set; {why}")
    if unknown:
        _LOGGER.debug("ignored fields=%s", ascii(unknown[:32]))
