"""`EngineArgs`: the arguments of `LLM` and `AsyncLLM`, under vLLM's names where it has them."""

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.flags.values import gibibytes, parse_byte_size
from baton.common.flags.vllm_arguments import FIXED_ARGUMENTS, WITHOUT_EFFECT
from baton.common.model_files.named_models import with_revision
from engine.config import EngineConfig

__all__ = ["AsyncEngineArgs", "EngineArgs"]


_OWN_TOKENIZER = "a model has its own tokenizer"
_RENAMED = {"kv_offloading_size": "swap_space"}
_RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "load_format": {"safetensors": "auto"},
}


class EngineArgs:
    """The arguments of `LLM` and `AsyncLLM`.

    None leaves an argument at its default. The usual arguments of vLLM are accepted if their
    value asks for what Baton does, such as `tensor_parallel_size=1`.

    Args:
        model: folder, GGUF file, `demo`, `smollm2`, `gemma3-270m`, or Hugging Face Hub name.
        revision: the Hub repository's branch, tag or commit. None: the main branch, or the one in
            the name (`org/model@v1.0`).
        tokenizer: None, or the same as `model`.
        tokenizer_revision: None, or the same as `revision`.
        chat_template: the path or the text of a template for `chat`. None: the checkpoint's.
        generation_config: whether `get_default_sampling_params` has the values of the
            checkpoint's generation_config.json ("auto") or only Baton's own ("none").
        seed: makes the draws of requests without a seed repeatable: a process that sends the
            same requests in the same order gets the same tokens. None: they are random.
        reasoning_start_str: the text before the part in which the model reasons, such as
            `<think>`. Structured outputs begin after that part, and
            `SamplingParams.thinking_token_budget` limits it. None: the model has no such part.
        reasoning_end_str: the text after that part, such as `</think>`; both are set or none.
        engine_arguments: fields of `engine.config.EngineConfig`, named like
            the flags: `dtype`, `max_num_seqs`, `block_size` ... `swap_space` is a text with a
            unit, such as "4GiB"; `kv_offloading_size` is its number of GiB, as in vLLM.

    Attributes:
        config: the engine's configuration.

    Raises:
        ConfigurationError: an argument's value is bad, or not supported; names it.
        TypeError: neither Baton nor vLLM has the argument.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        tokenizer: str | None = None,
        tokenizer_revision: str | None = None,
        chat_template: str | None = None,
        generation_config: str | None = "auto",
        seed: int | None = None,
        reasoning_start_str: str | None = None,
        reasoning_end_str: str | None = None,
        **engine_arguments: Any,
    ) -> None:
        if tokenizer is not None and str(tokenizer) != str(model):
            raise _refused("tokenizer", tokenizer, [model], _OWN_TOKENIZER)
        if tokenizer_revision not in (None, revision):
            raise _refused("tokenizer_revision", tokenizer_revision, [revision], _OWN_TOKENIZER)
        self.model = with_revision(str(model), revision)
        self.chat_template = chat_template
        self.generation_config = generation_config or "auto"
        self.seed = seed
        self.reasoning_strs = (reasoning_start_str, reasoning_end_str)
        self.config = EngineConfig(model=self.model, **_engine_fields(engine_arguments))


class AsyncEngineArgs(EngineArgs):
    """vLLM's name for the arguments of `AsyncLLM`: those of `EngineArgs`."""


def _engine_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `EngineConfig` that the arguments set."""
    known = {field.name for field in fields(EngineConfig)} - {"model"}
    values = {}
    for given, value in arguments.items():
        name = _RENAMED.get(given, given)
        if name not in known:
            _check_fixed(given, value, known)
        elif value is not None:
            values[name] = _converted(given, value)
    return values


def _check_fixed(name: str, value: Any, known: set[str]) -> None:
    """Refuses arguments that neither Baton nor vLLM has, and values that Baton lacks."""
    if name in WITHOUT_EFFECT:
        return
    if name not in FIXED_ARGUMENTS:
        names = sorted({*known, *FIXED_ARGUMENTS, *WITHOUT_EFFECT, *_RENAMED})
        close = get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"there is no argument {name!r}{hint}")
    fixed = FIXED_ARGUMENTS[name]
    if value is not None and value not in fixed.values:
        raise _refused(name, value, fixed.values or (None,), fixed.reason)


def _refused(name: str, value: Any, values: Any, reason: str) -> ConfigurationError:
    accepted = " or ".join(map(repr, values))
    return ConfigurationError(f"{name} is {value!r}; it must be {accepted}: {reason}")


def _converted(name: str, value: Any) -> Any:
    """The value of a field of `EngineConfig` for an argument's value."""
    if name == "swap_space":
        return _swap_space(value)
    if name == "kv_offloading_size":
        return _gibibytes(value)
    if name not in _RENAMED_VALUES:
        return value
    text = str(value).removeprefix("torch.")  # a type may be torch's object
    return _RENAMED_VALUES[name].get(text, text)


def _swap_space(value: Any) -> int:
    """The bytes of a text with a unit. A number is refused: vLLM's was in GiB."""
    if value == 0:
        return 0
    try:
        if not isinstance(value, str) or value.strip().isdecimal():
            raise ValueError(f"{value!r} has no unit")
        return parse_byte_size(value)
    except ValueError as error:
        raise ConfigurationError(f"swap_space: {error}; write it like '4GiB'") from None


def _gibibytes(value: Any) -> int:
    try:
        return gibibytes(str(value))
    except ArgumentTypeError as error:
        raise ConfigurationError(f"kv_offloading_size: {error}") from None
