"""`EngineConfig`: everything an engine is told, frozen. Pure: no torch.

Field names are the command line's flags with underscores, the same as in
vLLM where they mean the same.
"""

from dataclasses import dataclass, field
from typing import Any

from baton.errors import ConfigurationError

__all__ = ["DTYPES", "ROLES", "EngineConfig"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
ROLES = ("prefill", "decode", "both")
LOAD_FAILURE_POLICIES = ("recompute", "fail")


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
    device: str = _flag("auto", "torch device; auto is cuda where there is one, else cpu")
    num_threads: int | None = _flag(None, "CPU threads for compute (default: torch's choice)")
    block_size: int = _flag(16, "tokens per KV block")
    max_model_len: int | None = _flag(
        None, "most prompt and generated tokens together (default: the model's)"
    )
    max_num_seqs: int = _flag(64, "most sequences in one step")
    max_num_batched_tokens: int = _flag(2048, "most tokens in one step; prompts beyond are chunked")
    max_num_waiting: int = _flag(4096, "most requests waiting; more get RESOURCE_EXHAUSTED")
    enable_prefix_caching: bool = _flag(True, "reuse KV blocks of equal prefixes")
    gpu_memory_utilization: float = _flag(0.9, "share of GPU memory for weights and KV cache")
    kv_cache_memory: int | None = _flag(
        None, "bytes for the KV cache, say 2GiB (default on CPU: 1GiB)", parse="bytes"
    )
    num_gpu_blocks_override: int | None = _flag(None, "KV blocks in the pool, whatever fits")
    kv_connector: str | None = _flag(
        None, "URL of the KV connector: shm://NAME, file:///path, redis://host:port/db"
    )
    kv_load_failure_policy: str = _flag(
        "recompute", "what to do when KV cannot be loaded", choices=LOAD_FAILURE_POLICIES
    )

    def __post_init__(self) -> None:
        for name, choices in (
            ("role", ROLES),
            ("dtype", DTYPES),
            ("kv_load_failure_policy", LOAD_FAILURE_POLICIES),
        ):
            if getattr(self, name) not in choices:
                raise _bad_flag(name, getattr(self, name), f"one of {', '.join(choices)}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _bad_flag(name, value, ">= 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise _bad_flag("gpu_memory_utilization", self.gpu_memory_utilization, "in (0, 1]")
        if self.role == "prefill" and self.kv_connector is None:
            raise ConfigurationError("a prefill engine needs --kv-connector to hand KV over")

    @property
    def model_name(self) -> str:
        """The name that requests give."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]


_POSITIVE = (
    "num_threads",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_waiting",
    "kv_cache_memory",
    "num_gpu_blocks_override",
)


def _bad_flag(name: str, value: object, limit: str) -> ConfigurationError:
    return ConfigurationError(f"--{name.replace('_', '-')} is {value!r}; it must be {limit}")
