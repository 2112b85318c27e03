"""`EngineArgs`: the arguments of `LLM` and `AsyncLLM`, under vLLM's names where it has them."""

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.flags.sizes import parse_byte_size
from baton.common.flags.values import gibibytes
from baton.common.model_files.hub_names import with_revision
from engine.config import EngineConfig

__all__ = ["AsyncEngineArgs", "EngineArgs"]


@dataclass(frozen=True, slots=True)
class _Fixed:
    """An argument of vLLM with which Baton does the same for some values only.

    Attributes:
        values: these values; None is always one of them.
        reason: why no other value can be used.
    """

    values: tuple[Any, ...]
    reason: str


_ONE_DEVICE = "a model runs on one device"
_OWN_CODE = "models run Baton's own code"
_FILES = "a model is read from one folder or Hub repository"
_OWN_TOKENIZER = "a model has its own tokenizer"
_UNQUANTIZED = "weights are read as the checkpoint has them"
_TEXT = "models read and write text"
_NO_LORA = "adapters are not supported"
_NO_DRAFTS = "speculative decoding is not supported"
_FIXED: Mapping[str, _Fixed] = {
    "data_parallel_size": _Fixed((1,), _ONE_DEVICE),
    "decode_context_parallel_size": _Fixed((1,), _ONE_DEVICE),
    "prefill_context_parallel_size": _Fixed((1,), _ONE_DEVICE),
    "enable_expert_parallel": _Fixed((False,), _ONE_DEVICE),
    "cpu_offload_gb": _Fixed((0,), "weights stay on the device"),
    "trust_remote_code": _Fixed((False,), _OWN_CODE),
    "model_impl": _Fixed(("auto",), _OWN_CODE),
    "compilation_config": _Fixed(({},), _OWN_CODE),
    "hf_overrides": _Fixed(({},), _OWN_CODE),
    "worker_cls": _Fixed(("auto",), _OWN_CODE),
    "tokenizer_mode": _Fixed(("auto", "hf"), "tokenizers are those of the `tokenizers` library"),
    "skip_tokenizer_init": _Fixed((False,), "results have texts; set detokenize=False"),
    "code_revision": _Fixed(("main",), _OWN_CODE),
    "download_dir": _Fixed((), f"{_FILES}; HF_HOME names the folder of downloads"),
    "hf_token": _Fixed((False,), f"{_FILES}; HF_TOKEN has the token"),
    "hf_config_path": _Fixed((), _FILES),
    "ignore_patterns": _Fixed((), _FILES),
    "model_loader_extra_config": _Fixed(({},), _FILES),
    "kv_transfer_config": _Fixed((), "kv_connector has the URL of the connector"),
    "structured_outputs_config": _Fixed(
        ({},), "structured_outputs_backend and structured_outputs_max_whitespace state it"
    ),
    "config_format": _Fixed(("auto", "hf"), _FILES),
    "quantization": _Fixed((), _UNQUANTIZED),
    "quantization_param_path": _Fixed((), _UNQUANTIZED),
    "runner": _Fixed(("auto", "generate"), "models generate text"),
    "convert": _Fixed(("auto", "none"), "models generate text"),
    "task": _Fixed(("auto", "generate"), "models generate text"),
    "pooler_config": _Fixed(({},), "models generate text"),
    "limit_mm_per_prompt": _Fixed(({},), _TEXT),
    "mm_processor_kwargs": _Fixed(({},), _TEXT),
    "allowed_local_media_path": _Fixed(("",), _TEXT),
    "enable_prompt_embeds": _Fixed((False,), _TEXT),
    "enable_lora": _Fixed((False,), _NO_LORA),
    "speculative_config": _Fixed(({},), _NO_DRAFTS),
    "speculative_model": _Fixed((), _NO_DRAFTS),
    "enable_chunked_prefill": _Fixed((True,), "long prompts always run in chunks"),
    "disable_sliding_window": _Fixed((False,), "windows of attention are the model's"),
    "enable_sleep_mode": _Fixed((False,), "the model stays loaded"),
    "scheduling_policy": _Fixed(
        ("fcfs", "priority"), "requests run by priority, then in the order of arrival"
    ),
    "max_logprobs": _Fixed((20,), "at most 20 log-probabilities are returned per token"),
    "override_generation_config": _Fixed(({},), "generation_config.json has the defaults"),
    "reasoning_parser": _Fixed(("",), "reasoning_start_str and reasoning_end_str have the marks"),
}
_WITHOUT_EFFECT = (
    "disable_async_output_proc",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "disable_log_requests",
    "disable_log_stats",
    "enable_log_requests",
    "max_context_len_to_capture",
    "max_parallel_loading_workers",
    "max_seq_len_to_capture",
)
"""Arguments of vLLM that change no result: they are about logs and its own implementation."""
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
        model: checkpoint folder, GGUF file, `demo`, `smollm2`, or Hugging Face Hub name.
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
    if name in _WITHOUT_EFFECT:
        return
    if name not in _FIXED:
        names = sorted({*known, *_FIXED, *_WITHOUT_EFFECT, *_RENAMED})
        close = get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"there is no argument {name!r}{hint}")
    fixed = _FIXED[name]
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
