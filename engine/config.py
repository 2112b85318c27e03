"""`EngineConfig`: everything an engine is told, frozen. Pure: no torch.

Field names are the command line's flags with underscores, the same as in
vLLM where they mean the same.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.errors import ConfigurationError

__all__ = ["DTYPES", "KV_CACHE_DTYPES", "ROLES", "EngineConfig"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
KV_TRANSFER_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8_e4m3")
ROLES = ("prefill", "decode", "both")
LOAD_FORMATS = ("auto", "dummy")
LOAD_FAILURE_POLICIES = ("recompute", "fail")
PREEMPTION_MODES = ("auto", "recompute", "swap")


def _flag(default: Any, help_text: str, **metadata: Any) -> Any:
    """A field with its command-line help; `engine.cli_args` reads it."""
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine loads, schedules and hands over.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    model: str = field(metadata={"help": "checkpoint folder or Hugging Face Hub name"})
    served_model_name: str | None = _flag(None, "name in requests (default: --model's last part)")
    role: str = _flag("both", "half of the work this engine does", choices=ROLES)
    dtype: str = _flag(
        "auto", "type of weights, activations and KV; auto is the checkpoint's", choices=DTYPES
    )
    load_format: str = _flag(
        "auto",
        "auto: the checkpoint's weights; dummy: random ones in the shape of config.json",
        choices=LOAD_FORMATS,
    )
    kv_cache_dtype: str = _flag(
        "auto",
        "type of KV; auto is --dtype's, fp8_e4m3 about half of its bytes",
        choices=KV_CACHE_DTYPES,
    )
    device: str = _flag("auto", "torch device; auto is cuda where there is one, else cpu")
    num_threads: int | None = _flag(None, "CPU threads for compute (default: the cores it may use)")
    turns_folder: str | None = _flag(
        None, "a folder; on CPUs, workers of one machine that are given the same compute in turn"
    )
    block_size: int = _flag(16, "tokens per KV block")
    max_model_len: int | None = _flag(
        None, "most prompt and generated tokens together (default: the model's)"
    )
    max_num_seqs: int = _flag(64, "most sequences in one step")
    max_num_batched_tokens: int = _flag(2048, "most tokens in one step; prompts beyond are chunked")
    long_prefill_token_threshold: int | None = _flag(
        None, "most tokens of one prompt in one step, so that long prompts leave room for short"
    )
    max_num_partial_prefills: int = _flag(
        1, "most prompts that a step computes in part; whole ones may still overtake them"
    )
    max_num_waiting: int = _flag(4096, "most requests waiting; more get RESOURCE_EXHAUSTED")
    priority_ageing_s: float = _flag(
        30.0, "seconds of waiting that count as much as one level of priority"
    )
    preemption_mode: str = _flag(
        "auto",
        "how a request gives way: compute its KV again, swap it to the host, or the quicker",
        choices=PREEMPTION_MODES,
    )
    swap_space: int | None = _flag(
        None,
        "bytes on the host for swapped KV, say 4GiB (default: 4GiB; none on CPU)",
        parse="bytes",
    )
    async_scheduling: bool | None = _flag(
        None, "schedule the next step while this one computes (default: on a GPU)"
    )
    enforce_eager: bool = _flag(False, "run decode steps without CUDA graphs")
    enable_prefix_caching: bool = _flag(True, "reuse KV blocks of equal prefixes")
    gpu_memory_utilization: float = _flag(0.9, "share of GPU memory for weights and KV cache")
    kv_cache_memory: int | None = _flag(
        None, "bytes for the KV cache, say 2GiB (default on CPU: 1GiB)", parse="bytes"
    )
    num_gpu_blocks_override: int | None = _flag(None, "KV blocks in the pool, whatever fits")
    kv_connector: str | None = _flag(
        None,
        "URL of the KV connector: shm://NAME, file:///path, redis://host:port/db, grpc://, "
        "nixl://, multi://URL,URL (several), faulty+URL (with faults, to try), or memory:// "
        "(of one process)",
    )
    kv_publish: str = _flag(
        "finish",
        "when generated KV is put into the store: off, finish (of a sequence), or a number: "
        "whenever so many blocks have filled up",
    )
    kv_load_failure_policy: str = _flag(
        "recompute", "what to do when KV cannot be loaded", choices=LOAD_FAILURE_POLICIES
    )
    kv_transfer_block_size: int | None = _flag(
        None,
        "tokens per KV block between tiers, the same on all of them; divides --block-size "
        "(default: --block-size)",
    )
    kv_transfer_dtype: str = _flag(
        "auto",
        "type of KV between tiers, the same on all of them; auto is that of the KV here",
        choices=KV_TRANSFER_DTYPES,
    )
    kv_transfer_head_slices: int = _flag(
        1, "equal parts that a KV block's heads go in between tiers, the same on all of them"
    )
    kv_transfer_layer_slices: int = _flag(
        1,
        "equal parts that a KV block's layers go in between tiers, the same on all of them; "
        "where the connector can, each is saved once its layers are computed",
    )
    kv_transfer_timeout_s: float = _flag(
        60.0, "longest wait for a look-up, load or save that does not report; blocks stay fenced"
    )

    def __post_init__(self) -> None:
        for name, choices in (
            ("role", ROLES),
            ("dtype", DTYPES),
            ("load_format", LOAD_FORMATS),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("kv_transfer_dtype", KV_TRANSFER_DTYPES),
            ("kv_load_failure_policy", LOAD_FAILURE_POLICIES),
            ("preemption_mode", PREEMPTION_MODES),
        ):
            if getattr(self, name) not in choices:
                raise _bad_flag(name, getattr(self, name), f"one of {', '.join(choices)}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _bad_flag(name, value, ">= 1")
        for name in _POSITIVE_SECONDS:
            if not 0 < getattr(self, name) < math.inf:
                raise _bad_flag(name, getattr(self, name), "> 0 and finite")
        if self.swap_space is not None and self.swap_space < 0:
            raise _bad_flag("swap_space", self.swap_space, ">= 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise _bad_flag("gpu_memory_utilization", self.gpu_memory_utilization, "in (0, 1]")
        _check_transfer_block_size(self.transfer_block_size, self.block_size)
        _check_kv_publish(self.kv_publish)
        _check_turns_folder(self.turns_folder)
        if self.role == "prefill" and self.kv_connector is None:
            raise ConfigurationError("a prefill engine needs --kv-connector to hand KV over")

    @property
    def max_running(self) -> int:
        """The most sequences that run at once: each needs a token of a step's budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_chunk(self) -> int:
        """The most tokens of one sequence in one step."""
        return min(
            self.max_num_batched_tokens,
            self.long_prefill_token_threshold or self.max_num_batched_tokens,
        )

    @property
    def transfer_block_size(self) -> int:
        """Tokens of a block as tiers exchange them, and as keys name them."""
        return self.kv_transfer_block_size or self.block_size

    @property
    def model_name(self) -> str:
        """The name that requests give."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]


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
_POSITIVE_SECONDS = ("priority_ageing_s", "kv_transfer_timeout_s")


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
    raise _bad_flag("turns_folder", path, "a folder that exists, which this process may write to")


def _bad_flag(name: str, value: object, limit: str) -> ConfigurationError:
    return ConfigurationError(f"--{name.replace('_', '-')} is {value!r}; it must be {limit}")
