"""Checks of a configuration's values by the names of its fields. Pure."""

import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag_choices

__all__ = ["check_config"]

_MAX_JSON_WHITESPACE = 256
_MAX_STEP_MS = 3_600_000
_POSITIVE = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "nnodes",
    "master_port",
    "num_threads",
    "block_size",
    "kv_transfer_block_size",
    "kv_transfer_head_slices",
    "kv_transfer_layer_slices",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_waiting",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "num_state_slots",
    "state_interval",
    "max_num_partial_prefills",
)
_NOT_NEGATIVE = ("swap_space", "long_prefill_token_threshold", "grammar_cache_bytes")
_POSITIVE_SECONDS = (
    *("priority_ageing_s", "step_timeout_s", "kv_transfer_timeout_s", "grammar_timeout_s"),
)


def check_config(config: Any) -> None:
    """Refuses values that no engine can have, whatever its model.

    Raises:
        ConfigurationError: names the flag.
    """
    _check_choices(config)
    _check_numbers(config)
    _check_ranges(config)
    _check_ranks(config)
    _check_folder("turns_folder", config.turns_folder)
    _check_folder("weights_folder", config.weights_folder)


def _check_choices(config: Any) -> None:
    """Refuses values that their flags do not accept."""
    for field in fields(config):
        choices, value = flag_choices(field), getattr(config, field.name)
        if choices and value not in choices:
            raise _bad_flag(field.name, value, f"one of {', '.join(choices)}")


def _check_numbers(config: object) -> None:
    """Refuses sizes less than 1, numbers less than 0, and durations that are not positive and
    finite; None is accepted.
    """
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise _bad_flag(name, value, ">= 1")
    for name in _POSITIVE_SECONDS:
        if not 0 < getattr(config, name) < math.inf:
            raise _bad_flag(name, getattr(config, name), "> 0 and finite")
    for name in _NOT_NEGATIVE:
        if (getattr(config, name) or 0) < 0:
            raise _bad_flag(name, getattr(config, name), ">= 0")


def _check_ranges(config: Any) -> None:
    """Refuses other values that are out of range."""
    whitespace = config.structured_outputs_max_whitespace
    if not -1 <= whitespace <= _MAX_JSON_WHITESPACE:
        limit = f"from -1 to {_MAX_JSON_WHITESPACE}"
        raise _bad_flag("structured_outputs_max_whitespace", whitespace, limit)
    if not 0 < config.gpu_memory_utilization <= 1:
        raise _bad_flag("gpu_memory_utilization", config.gpu_memory_utilization, "in (0, 1]")
    if config.block_size % config.transfer_block_size:
        limit = f"a divisor of --block-size {config.block_size}"
        raise _bad_flag("kv_transfer_block_size", config.transfer_block_size, limit)
    if (config.state_interval or 0) % config.block_size:
        limit = f"a multiple of --block-size {config.block_size}"
        raise _bad_flag("state_interval", config.state_interval, limit)
    publish = config.kv_publish
    if publish not in ("off", "finish") and not (publish.isdecimal() and int(publish) > 0):
        raise _bad_flag("kv_publish", publish, "off, finish or a number >= 1")
    step_ms = config.max_step_ms
    is_number = isinstance(step_ms, int | float) and 0 <= step_ms <= _MAX_STEP_MS
    if step_ms not in (None, "auto") and not is_number:
        raise _bad_flag("max_step_ms", step_ms, f"auto or a number from 0 to {_MAX_STEP_MS:,}")


def _check_folder(name: str, path: str | None) -> None:
    """Refuses a path that is no folder, or that this process may not write to."""
    if path is None or (path and os.access(path, os.W_OK | os.X_OK) and Path(path).is_dir()):
        return
    raise _bad_flag(name, path, "an existing folder that this process may write to")


def _check_ranks(config: Any) -> None:
    """Refuses numbers of ranks and machines that do not fit each other, or other flags."""
    if not 0 <= config.node_rank < config.nnodes:
        raise _bad_flag("node_rank", config.node_rank, f"from 0 to --nnodes {config.nnodes} - 1")
    if config.nnodes > 1 and config.num_ranks == 1:
        raise _bad_flag("nnodes", config.nnodes, "1 without --tensor-parallel-size")
    if config.nnodes > 1 and config.distributed_executor_backend == "ray":
        raise _bad_flag("nnodes", config.nnodes, "1 with Ray, which chooses the machines")
    if config.speculative_config is not None:
        config.speculative_config.check_ranks(config.num_ranks)
    if config.distributed_executor_backend == "uni" and config.num_ranks > 1:
        limit = "mp, ray or external_launcher with several processes"
        raise _bad_flag("distributed_executor_backend", "uni", limit)


def _bad_flag(name: str, value: object, limit: str) -> ConfigurationError:
    """Returns the error for a field's value."""
    return ConfigurationError(f"--{name.replace('_', '-')} is {value!r}; it must be {limit}")
