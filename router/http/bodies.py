"""`SamplingBody`: the fields that request bodies of several protocols share.

Types are strict: a number is not a text. An explicit null is the same as an absent field. A
number such as 10.0 is an integer, as in JSON Schema: some clients write every number so.
Names follow OpenAI's API, then vLLM's. A body has few errors, however large it is: a list is
refused at its first wrong element, objects have few fields, or fields of any kind.
"""

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from baton.common.errors import InvalidArgumentError
from baton.common.request.sampling_params import PARAM_TYPES

__all__ = [
    "Array",
    "Body",
    "FewEntries",
    "Integer",
    "JsonObject",
    "SamplingBody",
    "StreamOptions",
    "TokenIds",
    "refuse_lacking",
]

_LOGGER = logging.getLogger("baton.http")

_MAX_ENTRIES = 1024
_Element = TypeVar("_Element")


def _refuse_many(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MAX_ENTRIES:
        raise PydanticCustomError(
            "too_many_fields",
            "Object has {length} fields; at most {most} are allowed",
            {"length": len(value), "most": _MAX_ENTRIES},
        )
    return value


def _integral(value: Any) -> Any:
    """An integer that is written as 10.0; any other value as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


def _all_integral(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Checks a list; looks for integers that are written as 10.0 only if it is refused."""
    try:
        return check(value)
    except ValidationError:
        if not isinstance(value, list) or float not in set(map(type, value)):
            raise
        return check(list(map(_integral, value)))


Integer = Annotated[int, BeforeValidator(_integral)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Array = Annotated[list[_Element], Field(fail_fast=True)]
"""A list with one error at most."""
Integers = Annotated[Array[int], WrapValidator(_all_integral)]
TokenIds = Annotated[Array[TokenId], WrapValidator(_all_integral)]
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
        "moderation": (),
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
        "prompt_cache_options",
        "verbosity",
        "access_programs",
        "background_options",
        "image",
        "cache_control",
        "diagnostics",
        "speed",
        "billing_policy",
        "fallback_credit_token",
    }
)
"""Names of OpenAI's and Anthropic's APIs that change no answer here."""


_JSON_TYPES: Mapping[Any, Any] = {
    float | None: float | None,
    int | None: Integer | None,
    bool | None: bool | None,
    Sequence[int] | None: Integers | None,
    Sequence[str] | None: Array[str] | None,
}
"""Types in bodies by those of the fields of `SamplingParams`."""
_OTHER_FORMS = frozenset(
    {"beam_width", "logprobs", "detokenize", "extra_args", "prediction", "output_kind"}
)
"""Fields of `SamplingParams` that bodies state in other ways, or not at all."""


class Body(BaseModel):
    """A body of a request, with few fields."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_many_fields(cls, fields: Any) -> Any:
        return _refuse_many(fields)


_Body = TypeVar("_Body", bound=Body)


class StreamOptions(Body):
    """Contents of a stream besides the text.

    Attributes:
        include_usage: a last chunk with token counts.
        continuous_usage_stats: token counts so far in every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _with_sampling_params(body: type[_Body]) -> type[_Body]:
    """Adds to a body the fields of `SamplingParams` that it does not declare itself."""
    added: dict[str, Any] = {
        name: (_JSON_TYPES[kind], None)
        for name, kind in PARAM_TYPES.items()
        if name not in body.model_fields and name not in _OTHER_FORMS
    }
    return create_model(
        body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **added
    )


@_with_sampling_params
class SamplingBody(Body):
    """The sampling parameters of a body; docs/sampling.md describes them.

    Declared here are those that code reads by name or that have other types than in
    `SamplingParams`. A body has its other fields, too, whose values `router.http.params` takes.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Integer | None = None
    stop: str | Array[str] | None = None
    stop_token_ids: Integers | None = None
    max_tokens: Integer | None = None
    logit_bias: Annotated[dict[str, float] | None, FewEntries] = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Integer | None = None
    prompt_logprobs: Integer | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None
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
    priority: Annotated[Integer | None, Field(ge=-(2**31), lt=2**31)] = None
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
    options = (body.model_extra or {}).get("prompt_cache_options")
    if isinstance(options, dict) and options.get("prewarm"):
        raise InvalidArgumentError(
            "prompt_cache_options.prewarm is set; this server does not support it"
        )
    if unknown:
        _LOGGER.debug("ignored fields=%s", ascii(unknown[:32]))
