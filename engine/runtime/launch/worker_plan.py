"""Plans a worker's use of its container's limits: its memory, and the threads that compute."""

import logging

import torch

import kernels
from baton.common.container_limits import LimitsShare, plan_threads
from baton.common.machine_limits import private_bytes, read_memory
from engine.config import EngineConfig
from engine.models.config import ModelConfig
from engine.runtime.draws.logprobs import part_bytes
from engine.runtime.forward.memory_plan import MemoryPlan
from engine.runtime.weights.loader import LoadedModel
from kvstore.layout import KvLayout
from kvstore.mover.staging import staging_bytes
from kvstore.registry import memory_bytes
from kvstore.url import MULTI_SCHEME, scheme_of, split_members

__all__ = ["layer_bytes", "plan_memory", "start_threads", "step_bytes"]

_FLOAT_BYTES = 4
_COPIES = 2
"""Of the hidden states: while a step is recorded, the memory of smaller ones is kept."""
_COPIES_OF_LOGITS = 3
"""Logits of the model, logits that rules have changed, and logits that are drawn from."""
_MIN_PROCESS_BYTES = 184 << 20
"""Somewhat more than the interpreter with torch: starts differ by some MiB, and the limit that an
error names must do for the next one.
"""
_GROWTH_BYTES = 64 << 20
"""What a worker takes after its start: requests, calls, prefixes, gaps in the heap, pages of tables
in the kernel, and the processes of the watchdog and of health checks.
"""

_logger = logging.getLogger("baton.engine")


def start_threads(config: EngineConfig, num_local: int) -> None:
    """Sets on how many threads this process computes, and logs it.

    Args:
        config: the flags.
        num_local: number of the engine's ranks on this machine.

    Raises:
        ConfigurationError: the container's limit of tasks is too low.
    """
    of_rank = max(1, kernels.default_num_threads() // num_local)
    share = LimitsShare.from_environment().of_ranks(num_local)
    num_threads = plan_threads(config.num_threads, of_rank, share)
    kernels.set_num_threads(num_threads)
    cores = kernels.default_num_threads()
    _logger.info("computes on %d threads, with %d usable cores", num_threads, cores)


def plan_memory(
    config: EngineConfig,
    loaded: LoadedModel,
    layout: KvLayout,
    *,
    num_local: int = 1,
    drafter_bytes: int = 0,
    is_on_cpu: bool = True,
) -> MemoryPlan | None:
    """Plans the memory of a worker that has loaded its model; returns None without a limit.

    Args:
        config: the flags.
        loaded: the model.
        layout: of a block of the KV cache.
        num_local: number of the engine's ranks on this machine.
        drafter_bytes: what drafting tokens will allocate, however many blocks there are.
        is_on_cpu: whether the model and its KV cache are in this memory.
    """
    limit = read_memory().limit
    if limit is None:
        return None
    of_worker = LimitsShare.from_environment()
    share = of_worker.of_ranks(num_local)
    weights = loaded.weight_bytes if is_on_cpu else 0
    private_weights = 0 if loaded.shares_weights else weights
    process = (private_bytes() or 0) - private_weights
    parts = {
        "weights": private_weights or weights // of_worker.num_workers,
        "process": max(_MIN_PROCESS_BYTES, process) + _GROWTH_BYTES,
        "step": step_bytes(config, loaded) + drafter_bytes if is_on_cpu else 0,
        "transfers": _num_connectors(config) * staging_bytes(layout),
        "swapped KV": config.swap_space or 0,
        # A worker is charged for the objects that it touches first, which may be all.
        "KV store": memory_bytes(config.kv_connector or "") // share.num_workers,
    }
    follows = bool(parts["KV store"]) and "max_bytes=" not in (config.kv_connector or "")
    return MemoryPlan(limit, share, parts, store_follows_limit=follows)


def _num_connectors(config: EngineConfig) -> int:
    """Returns how many connectors there are, each of which has buffers."""
    url = config.kv_connector or ""
    return len(split_members(url)) if scheme_of(url) == MULTI_SCHEME else int(bool(url))


def step_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Returns an upper bound of the working memory of the largest step: the hidden states of its
    tokens, the logits of the rows that draw, and the tokens of sequences with logit rules.
    """
    model = loaded.model.config
    itemsize: int = getattr(torch, loaded.dtype).itemsize
    hidden = _COPIES * layer_bytes(model, config.max_step_tokens, itemsize)
    num_rows = config.max_running * (1 + config.max_drafts)
    of_prompts = min(part_bytes(), config.max_step_tokens * model.vocab_size * _FLOAT_BYTES)
    logits = _COPIES_OF_LOGITS * max(num_rows * model.vocab_size * _FLOAT_BYTES, of_prompts)
    rules = config.max_running * (config.max_model_len or model.max_model_len) * _FLOAT_BYTES
    return hidden + logits + rules


def layer_bytes(model: ModelConfig, num_tokens: int, itemsize: int) -> int:
    """Returns an upper bound of the memory of a layer's inputs and results.

    Args:
        model: the model's shape.
        num_tokens: number of tokens of the step.
        itemsize: bytes of an element.
    """
    width = 4 * model.hidden_size + model.mixer_size + 2 * model.mlp_size
    return num_tokens * width * itemsize + model.workspace_bytes(num_tokens, itemsize)
