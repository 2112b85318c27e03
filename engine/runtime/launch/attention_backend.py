"""Chooses what computes attention on a GPU, and refuses a choice that would fail in a request."""

import logging
import math
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import islice

import numpy as np
import torch

from baton.common.errors import ConfigurationError
from engine.config import AUTO, EngineConfig
from engine.runtime.device import current
from engine.runtime.forward.flashinfer_attention import FlashInferAttention, HostSequences
from kernels import AttentionMetadata, reference

__all__ = ["check_flashinfer", "uses_flashinfer"]

_PACKAGES = ("flashinfer-python", "flashinfer-jit-cache")
_CAPABILITY = (8, 0)  # Ampere
_INSTALL = "pip install 'baton-llm[flashinfer]'"
_COMPILER = (
    "it compiles kernels with nvcc when they are first used, unless the package "
    "flashinfer-jit-cache of the same version is installed"
)
_MAX_CAUSE = 1000
"""Characters of an error that are shown: those of a compiler can be pages."""
_MAX_DIFFERENCE = 0.05
"""The error of numbers around 1 that were rounded to bfloat16 before and after the sums."""
_BLOCK_SIZE = 16
_NUM_LAYERS, _LAYER = 2, 1
_CONTEXT_LENS, _QUERY_LENS = (37, 17), (21, 1)

_logger = logging.getLogger("baton.engine")


def uses_flashinfer(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether FlashInfer computes attention in steps that are no graphs.

    Raises:
        ConfigurationError: --attention-backend names what cannot be used here; says why.
    """
    name = config.attention_backend
    if name == AUTO:
        return False  # until a measurement says where FlashInfer is faster
    if device.type != "cuda":
        raise ConfigurationError(
            f"--attention-backend is {name}, which is for NVIDIA GPUs, and the device is "
            f"{device.type}; leave it at auto"
        )
    if name != "flashinfer":
        return False
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        raise ConfigurationError(
            "--attention-backend is flashinfer, which needs a GPU of compute capability 8.0 or "
            f"newer; {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )
    if config.kv_cache_dtype != AUTO:
        raise ConfigurationError(
            f"--attention-backend is flashinfer, which does not read --kv-cache-dtype "
            f"{config.kv_cache_dtype}, as each of its vectors has a scale: use triton"
        )
    _load()
    return True


def check_flashinfer(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Attends once over a small pool, and compares the result with the reference on the CPU.

    Args:
        device: the GPU.
        dtype: of queries and KV.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values.
        head_dim: elements of a head.

    Raises:
        ConfigurationError: FlashInfer does not compute such heads, cannot be compiled or launched,
            or its result is wrong.
    """
    query, pool, meta = _trial_step(dtype, num_heads, num_kv_heads, head_dim)
    scale = 1 / math.sqrt(head_dim)
    expected = reference.paged_attention(query.float(), pool[:, _LAYER].float(), meta, scale=scale)
    sequences = HostSequences(
        meta.query_starts.numpy(), meta.context_lens.numpy(), meta.block_tables[None].numpy()
    )
    try:
        with current(device), torch.inference_mode():
            (attend,) = FlashInferAttention(_BLOCK_SIZE, device).begin(sequences)
            # The whole pool: a copy of one layer would not have the distances of a pool.
            kv_layer = pool.to(device)[:, _LAYER]
            output = attend(query.to(device), kv_layer, meta, scale=scale).float().cpu()
    except ConfigurationError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"[:_MAX_CAUSE]
        raise ConfigurationError(
            f"--attention-backend is flashinfer, which fails on {device}; {_COMPILER} ({cause})"
        ) from error
    difference = float((output - expected).abs().max())
    if not difference <= _MAX_DIFFERENCE:  # NaN is a difference too
        raise ConfigurationError(
            f"--attention-backend is flashinfer, which computes wrong numbers on {device}, off by "
            f"up to {difference:.3g}; use triton"
        )


def _load() -> None:
    """Imports FlashInfer.

    Raises:
        ConfigurationError: it is not installed, or does not fit the other packages.
    """
    try:
        import_module("flashinfer")
    except Exception as error:  # it raises what it likes where versions do not fit
        cause = f"{type(error).__name__}: {error}"[:_MAX_CAUSE]
        raise ConfigurationError(
            f"--attention-backend is flashinfer, which cannot be imported beside torch "
            f"{torch.__version__}: {_INSTALL} ({cause})"
        ) from error
    versions = {name: _version_of(name) for name in _PACKAGES}
    _logger.info("attention by %s", ", ".join(f"{k} {v}" for k, v in versions.items()))


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _trial_step(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Returns the queries of a chunk and of a token, a pool of two layers, and the step's metadata
    over its blocks in reverse order.
    """
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // _BLOCK_SIZE) for length in _CONTEXT_LENS]
    shape = sum(counts), _NUM_LAYERS, 2, num_kv_heads, _BLOCK_SIZE, head_dim
    pool = torch.randn(shape, generator=generator).to(dtype)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    ids = reversed(range(sum(counts)))
    for table, count in zip(tables, counts, strict=True):
        table[:count] = torch.tensor(list(islice(ids, count)))
    num_tokens = sum(_QUERY_LENS)
    query = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    meta = AttentionMetadata(
        block_tables=tables,
        query_starts=torch.from_numpy(np.cumsum((0, *_QUERY_LENS), dtype=np.int32)),
        context_lens=torch.tensor(_CONTEXT_LENS, dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        max_query_len=max(_QUERY_LENS),
        max_context_len=max(_CONTEXT_LENS),
    )
    return query, pool, meta
