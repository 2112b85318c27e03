"""`EngineConfig`: the frozen configuration of an engine. Pure: no torch.

Field names are the command line's flags with underscores. Fields that vLLM has
too have vLLM's names.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.errors import ConfigurationError

__all__ = ["DTYPES", "GRAMMAR_BACKENDS", "KV_CACHE_DTYPES", "ROLES", "EngineConfig"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
KV_TRANSFER_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8_e4m3")
ROLES = ("prefill", "decode", "both")
LOAD_FORMATS = ("auto", "dummy")
LOAD_FAILURE_POLICIES = ("recompute", "fail")
PREEMPTION_MODES = ("auto", "recompute", "swap")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
GRAMMAR_BACKENDS = ("xgrammar", "llguidance")


def _flag(default: Any, help_text: str, **metadata: Any) -> Any:
    """Returns a field with its command-line help, which `engine.cli_args` reads."""
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The flags of one engine, which loads a model, schedules requests and transfers KV.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    model: str = field(metadata={"help": "checkpoint folder or Hugging Face Hub name"})
    served_model_name: str | None = _flag(
        None, "model name in requests (default: the last part of --model)"
    )
    role: str = _flag("both", "work of this engine: prefill, decode, or both", choices=ROLES)
    dtype: str = _flag(
        "auto", "type of weights, activations and KV; auto uses the checkpoint's", choices=DTYPES
    )
    load_format: str = _flag(
        "auto",
        "auto reads the checkpoint's weights; dummy makes random weights from config.json alone",
        choices=LOAD_FORMATS,
    )
    kv_cache_dtype: str = _flag(
        "auto",
        "type of KV; auto uses that of --dtype, fp8_e4m3 takes about half the bytes of bfloat16",
        choices=KV_CACHE_DTYPES,
    )
    device: str = _flag("auto", "torch device; auto uses a GPU if torch finds one, else the CPU")
    num_threads: int | None = _flag(
        None, "CPU threads that compute (default: the cores this process may use)"
    )
    turns_folder: str | None = _flag(
        None, "existing folder for lock files; CPU workers with the same folder compute in turn"
    )
    block_size: int = _flag(16, "tokens per KV block")
    max_model_len: int | None = _flag(
        None, "maximum of prompt and generated tokens together (default: the model's)"
    )
    max_num_seqs: int = _flag(64, "maximum number of sequences in one step")
    max_num_batched_tokens: int = _flag(
        2048, "maximum number of tokens in one step; longer prompts run in chunks"
    )
    long_prefill_token_threshold: int | None = _flag(
        None, "maximum tokens of one prompt in one step, so that short prompts get their share"
    )
    max_num_partial_prefills: int = _flag(
        1, "maximum number of partly computed prompts in a step; prompts that fit may overtake them"
    )
    max_num_waiting: int = _flag(
        4096, "maximum number of waiting requests; further ones get RESOURCE_EXHAUSTED"
    )
    priority_ageing_s: float = _flag(
        30.0, "seconds of waiting that count as one level of a request's priority"
    )
    preemption_mode: str = _flag(
        "auto",
        "how a request is preempted: recompute its KV, swap it to host memory, or the faster one",
        choices=PREEMPTION_MODES,
    )
    swap_space: int | None = _flag(
        None,
        "host memory for swapped KV, such as 4GiB (default: 4GiB on a GPU, 0 on a CPU)",
        parse="bytes",
    )
    async_scheduling: bool | None = _flag(
        None, "schedule the next step while the current one computes (default: only on a GPU)"
    )
    enforce_eager: bool = _flag(False, "run decode steps without CUDA graphs")
    logits_processors: Sequence[str] = _flag(
        (),
        "logits processors to load, separated by commas: names of installed ones, or module:Class",
        parse="names",
    )
    logprobs_mode: str = _flag(
        "raw_logprobs",
        "log-probabilities that requests get: the model's own, or those of the distribution that "
        "tokens are drawn from, after all sampling parameters",
        choices=LOGPROBS_MODES,
    )
    structured_outputs_backend: str = _flag(
        "auto",
        "library for structured outputs, equal on all workers; auto uses xgrammar for what it "
        "enforces and llguidance for the rest",
        choices=("auto", *GRAMMAR_BACKENDS),
    )
    grammar_timeout_s: float = _flag(
        10.0,
        "CPU seconds for compiling one grammar, or thrice that on the clock; a request with a "
        "slower one is refused",
    )
    grammar_cache_bytes: int = _flag(
        256 * 2**20, "bytes for compiled grammars that are kept, such as 256MiB", parse="bytes"
    )
    enable_prefix_caching: bool = _flag(True, "reuse the KV blocks of equal prefixes")
    gpu_memory_utilization: float = _flag(0.9, "share of GPU memory for weights and KV cache")
    kv_cache_memory: int | None = _flag(
        None, "bytes for the KV cache, such as 2GiB (default: 1GiB on a CPU)", parse="bytes"
    )
    num_gpu_blocks_override: int | None = _flag(
        None, "number of KV blocks in the pool, instead of the computed number"
    )
    kv_connector: str | None = _flag(
        None,
        "URL of the KV connector: shm://NAME, file:///path, redis://host:port/db, grpc://, "
        "nixl://, multi://URL,URL (several), faulty+URL (injects faults) or memory:// (within "
        "one process)",
    )
    kv_publish: str = _flag(
        "finish",
        "when to save generated KV: off, finish (when a sequence ends), or a number N (after "
        "every N full blocks)",
    )
    kv_load_failure_policy: str = _flag(
        "recompute",
        "recompute KV that cannot be loaded, or fail the request",
        choices=LOAD_FAILURE_POLICIES,
    )
    kv_transfer_block_size: int | None = _flag(
        None,
        "tokens per KV block between tiers; must divide --block-size and be equal on all workers "
        "(default: --block-size)",
    )
    kv_transfer_dtype: str = _flag(
        "auto",
        "type of KV between tiers, equal on all workers; auto uses this worker's",
        choices=KV_TRANSFER_DTYPES,
    )
    kv_transfer_head_slices: int = _flag(
        1,
        "number of objects into which a KV block's heads are split between tiers, equal on all "
        "workers",
    )
    kv_transfer_layer_slices: int = _flag(
        1,
        "number of objects into which a KV block's layers are split between tiers, equal on all "
        "workers; memory, shm and file save each when its layers are computed",
    )
    kv_transfer_timeout_s: float = _flag(
        60.0, "longest wait for the result of a look-up, load or save; its blocks stay out of use"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "logits_processors", _names(self.logits_processors))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _bad_flag(name, getattr(self, name), f"one of {', '.join(choices)}")
        self._check_ranges()
        _check_transfer_block_size(self.transfer_block_size, self.block_size)
        _check_kv_publish(self.kv_publish)
        _check_turns_folder(self.turns_folder)
        if self.role == "prefill" and self.kv_connector is None:
            raise ConfigurationError(
                "--kv-connector is not set; a prefill engine needs it to hand KV off"
            )

    def _check_ranges(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _bad_flag(name, value, ">= 1")
        for name in _POSITIVE_SECONDS:
            if not 0 < getattr(self, name) < math.inf:
                raise _bad_flag(name, getattr(self, name), "> 0 and finite")
        for name in _NOT_NEGATIVE:
            if (getattr(self, name) or 0) < 0:
                raise _bad_flag(name, getattr(self, name), ">= 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise _bad_flag("gpu_memory_utilization", self.gpu_memory_utilization, "in (0, 1]")

    @property
    def max_running(self) -> int:
        """Maximum number of sequences that run at once; each needs a token of a step's budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_chunk(self) -> int:
        """Maximum number of tokens of one sequence in one step."""
        return min(
            self.max_num_batched_tokens,
            self.long_prefill_token_threshold or self.max_num_batched_tokens,
        )

    @property
    def transfer_block_size(self) -> int:
        """Tokens per transfer block: the unit that tiers exchange and that block keys name."""
        return self.kv_transfer_block_size or self.block_size

    @property
    def model_name(self) -> str:
        """The model name in requests."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]


_CHOICES = {
    "role": ROLES,
    "dtype": DTYPES,
    "load_format": LOAD_FORMATS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "kv_transfer_dtype": KV_TRANSFER_DTYPES,
    "kv_load_failure_policy": LOAD_FAILURE_POLICIES,
    "preemption_mode": PREEMPTION_MODES,
    "logprobs_mode": LOGPROBS_MODES,
    "structured_outputs_backend": ("auto", *GRAMMAR_BACKENDS),
}
_POSITIVE = (
    "num_threads",
    "block_size",
    "kv_transfer_block_size",
    "kv_transfer_head_slices",
    "kv_transfer_layer_slices",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_waiting",
    "kv_cache_memory",
    "num_gpu_blocks_override",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
)
_NOT_NEGATIVE = ("swap_space", "grammar_cache_bytes")
_POSITIVE_SECONDS = ("priority_ageing_s", "kv_transfer_timeout_s", "grammar_timeout_s")


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Returns names as a tuple; a flag's text has them separated by commas."""
    names = given.split(",") if isinstance(given, str) else given
    return tuple(name.strip() for name in names if name.strip())


def _check_transfer_block_size(transfer_block_size: int, block_size: int) -> None:
    if block_size % transfer_block_size:
        limit = f"a divisor of --block-size {block_size}"
        raise _bad_flag("kv_transfer_block_size", transfer_block_size, limit)


def _check_kv_publish(policy: str) -> None:
    if policy not in ("off", "finish") and not (policy.isdecimal() and int(policy) > 0):
        raise _bad_flag("kv_publish", policy, "off, finish or a number >= 1")


def _check_turns_folder(path: str | None) -> None:
    if path is None or (path and Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)):
        return
    raise _bad_flag("turns_folder", path, "an existing folder that this process may write to")


def _bad_flag(name: str, value: object, limit: str) -> ConfigurationError:
    return ConfigurationError(f"--{name.replace('_', '-')} is {value!r}; it must be {limit}")
