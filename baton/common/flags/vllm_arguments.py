"""Arguments of vLLM that Baton does not have: which of their values it serves, and why no others.

The offline `LLM` takes all of them, and command lines the usual ones. docs/from-vllm.md describes
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["FIXED_ARGUMENTS", "WITHOUT_EFFECT", "FixedArgument"]


@dataclass(frozen=True, slots=True)
class FixedArgument:
    """An argument with which Baton does the same as vLLM for some values only.

    Attributes:
        reason: why no other value can be used.
        values: the values that ask for what Baton does; None always does, too.
        flags: the names by which command lines have it; empty if they do not.
    """

    reason: str
    values: tuple[Any, ...] = ()
    flags: tuple[str, ...] = ()


_OWN_CODE = "models run Baton's own code"
_ONE_FOLDER = "a model is read from one folder, GGUF file or Hub repository"
_GENERATES = "models generate text"
_TEXT = "models read and write text"
_NOT_BY_CONTEXT = "ranks divide a model's layers and heads, not the context"

FIXED_ARGUMENTS: Mapping[str, FixedArgument] = MappingProxyType(
    {
        "data_parallel_size": FixedArgument(
            "a process has one engine; --data-parallel-size of baton prefill and baton decode, or "
            "--decode-workers of baton serve, starts several",
            (1,),
            ("--data-parallel-size", "-dp"),
        ),
        "decode_context_parallel_size": FixedArgument(_NOT_BY_CONTEXT, (1,)),
        "prefill_context_parallel_size": FixedArgument(_NOT_BY_CONTEXT, (1,)),
        "enable_expert_parallel": FixedArgument("models with experts are not supported", (False,)),
        "cpu_offload_gb": FixedArgument("weights stay on the device", (0,)),
        "trust_remote_code": FixedArgument(
            "Baton runs no code from checkpoints", (False,), ("--trust-remote-code",)
        ),
        "model_impl": FixedArgument(_OWN_CODE, ("auto",)),
        "compilation_config": FixedArgument(_OWN_CODE, ({},)),
        "hf_overrides": FixedArgument(_OWN_CODE, ({},)),
        "worker_cls": FixedArgument(_OWN_CODE, ("auto",)),
        "tokenizer_mode": FixedArgument(
            "tokenizers are those of the `tokenizers` library", ("auto", "hf")
        ),
        "skip_tokenizer_init": FixedArgument("results have texts; set detokenize=False", (False,)),
        "code_revision": FixedArgument(_OWN_CODE, ("main",)),
        "download_dir": FixedArgument(
            "the environment variable HF_HUB_CACHE names the folder of downloads",
            (),
            ("--download-dir",),
        ),
        "hf_token": FixedArgument("the environment variable HF_TOKEN has the token", (False,)),
        "hf_config_path": FixedArgument(_ONE_FOLDER),
        "ignore_patterns": FixedArgument(_ONE_FOLDER),
        "model_loader_extra_config": FixedArgument(_ONE_FOLDER, ({},)),
        "config_format": FixedArgument(_ONE_FOLDER, ("auto", "hf")),
        "kv_transfer_config": FixedArgument("kv_connector has the URL of the connector"),
        "structured_outputs_config": FixedArgument(
            "structured_outputs_backend and structured_outputs_max_whitespace state it", ({},)
        ),
        "quantization_param_path": FixedArgument("scales of KV are measured as it is written"),
        "runner": FixedArgument(_GENERATES, ("auto", "generate")),
        "convert": FixedArgument(_GENERATES, ("auto", "none")),
        "task": FixedArgument(_GENERATES, ("auto", "generate")),
        "pooler_config": FixedArgument(_GENERATES, ({},)),
        "limit_mm_per_prompt": FixedArgument(_TEXT, ({},)),
        "mm_processor_kwargs": FixedArgument(_TEXT, ({},)),
        "allowed_local_media_path": FixedArgument(_TEXT, ("",)),
        "enable_prompt_embeds": FixedArgument(_TEXT, (False,)),
        "enable_lora": FixedArgument("adapters are not supported", (False,)),
        "speculative_model": FixedArgument("speculative_config has the draft model"),
        "enable_chunked_prefill": FixedArgument("long prompts always run in chunks", (True,)),
        "disable_sliding_window": FixedArgument("windows of attention are the model's", (False,)),
        "enable_sleep_mode": FixedArgument("the model stays loaded", (False,)),
        "scheduling_policy": FixedArgument(
            "requests run by priority, then in the order of arrival", ("fcfs", "priority")
        ),
        "max_logprobs": FixedArgument("at most 20 log-probabilities are returned per token", (20,)),
        "override_generation_config": FixedArgument(
            "generation_config.json has the defaults", ({},)
        ),
        "reasoning_parser": FixedArgument(
            "reasoning_start_str and reasoning_end_str have the tags", ("",)
        ),
    }
)

WITHOUT_EFFECT = (
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
"""Arguments that change no result: they are about logs and vLLM's own implementation."""
