"""Sizes and allocates the KV pool and the host pool, each `[num_blocks, *layout.block_shape]`."""

import logging
import math
from dataclasses import dataclass

import torch

import kernels
from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.kv_cache.spec import KvCacheSpec, LayerGroups
from engine.runtime.forward.memory_plan import MemoryPlan
from engine.runtime.weights.loader import LoadedModel
from kernels import EngineRanks
from kvstore.layout import DTYPE_BYTES, FP8, NARROW_DTYPES, SCALE_BYTES, KvLayout, KvShape
from kvstore.transfer_form import PoolShare

__all__ = [
    "DeviceMemory",
    "allocate_host_pool",
    "allocate_host_slots",
    "allocate_pool",
    "check_kv_cache_dtype",
    "decide_layout",
    "decide_num_blocks",
    "decide_num_host_blocks",
    "default_cpu_bytes",
    "log_pool",
    "share_of",
]

_DEFAULT_CPU_BYTES = 2**30
_DEFAULT_SWAP_BYTES = 4 * 2**30  # for a worker on a GPU
_MEBIBYTE = 2**20
_FP8_CAPABILITY = (8, 9)  # Ada

logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a GPU after the profile run, in bytes.

    Attributes:
        total: size of the device's memory.
        free: free memory, with torch's cache emptied.
        used_by_others: memory in use before the engine loaded anything.
        reserved: memory that torch holds, which is the weights.
        peak_reserved: maximum that torch held, which is weights and activations.
        graphs: memory that CUDA graphs will need.
    """

    total: int
    free: int
    used_by_others: int
    reserved: int
    peak_reserved: int
    graphs: int

    def left_for_pool(self, utilization: float) -> int:
        """Returns the size of a pool with which the engine stays within its share."""
        outside_torch = max(0, self.total - self.free - self.reserved - self.used_by_others)
        within_share = int(self.total * utilization) - self.peak_reserved - outside_torch
        activations = self.peak_reserved - self.reserved
        return max(0, min(within_share, self.free - activations) - self.graphs)


def check_kv_cache_dtype(kv_cache_dtype: str, device: torch.device) -> None:
    """Checks, before a model is loaded, that a GPU can read the type of KV.

    Raises:
        ConfigurationError: it cannot; names the flag, the GPU and the capability needed.
    """
    if kv_cache_dtype != FP8 or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        raise ConfigurationError(
            f"--kv-cache-dtype {FP8} needs a GPU of compute capability 8.9 or newer; "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )


def decide_layout(config: EngineConfig, loaded: LoadedModel, groups: LayerGroups) -> KvLayout:
    """Returns the layout of a block.

    Raises:
        ConfigurationError: 8-bit heads do not fill whole words, or have different shapes; names the
            flag to change.
    """
    dtype = loaded.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    if dtype in NARROW_DTYPES and groups.shapes:
        raise ConfigurationError(
            f"--kv-cache-dtype is {dtype}; it works with models whose layers all have K and V of "
            "one shape"
        )
    first = groups.shapes[0] if groups.shapes else KvShape(loaded.num_kv_heads, loaded.head_dim)
    whole = SCALE_BYTES // math.gcd(SCALE_BYTES, loaded.head_dim)
    if dtype in NARROW_DTYPES and config.block_size % whole:
        raise ConfigurationError(
            f"--block-size is {config.block_size}; with --kv-cache-dtype {dtype} and heads of "
            f"{loaded.head_dim} elements it must be a multiple of {whole}"
        )
    return KvLayout(
        num_layers=groups.layers_per_block,
        num_kv_heads=first.num_kv_heads,
        block_size=config.block_size,
        head_dim=first.head_dim,
        dtype=dtype,
        num_parts=loaded.num_kv_parts,
        group_shapes=groups.shapes,
    )


def share_of(rank: int, ranks: EngineRanks, num_kv_heads: int) -> PoolShare:
    """Returns the heads and layers that a rank has.

    Args:
        rank: number of the rank.
        ranks: all ranks of the engine.
        num_kv_heads: of the model.
    """
    width = ranks.size // ranks.num_stages
    stage = ranks.stage_of(rank)
    return PoolShare.of(rank % width, width, num_kv_heads, stage, ranks.num_stages)


def default_cpu_bytes(plan: MemoryPlan | None) -> int:
    """Returns the size of the pool on a CPU unless a flag sets it: 1 GiB, or what fits.

    Args:
        plan: of the memory that a container limits; None without a limit.
    """
    return _DEFAULT_CPU_BYTES if plan is None else min(_DEFAULT_CPU_BYTES, plan.left)


def decide_num_blocks(
    config: EngineConfig,
    layout: KvLayout,
    spec: KvCacheSpec,
    max_model_len: int,
    free_bytes: int,
    *,
    draft_block_bytes: int = 0,
    state_bytes: int = 0,
    is_on_cpu: bool = False,
    plan: MemoryPlan | None = None,
) -> int:
    """Returns the number of blocks of the pool, without those that hold states.

    The first of these that applies: `num_gpu_blocks_override`; the blocks that fit in
    `kv_cache_memory_bytes`; those that fit in `free_bytes`, but on a CPU no more than
    `max_num_seqs` requests of `max_model_len` need.

    Args:
        config: the flags.
        layout: shape of a block.
        spec: computes how many blocks a sequence needs.
        max_model_len: length of the longest request, in tokens.
        free_bytes: memory left of the engine's share of the GPU, or `default_cpu_bytes`.
        draft_block_bytes: bytes that drafting tokens needs for each block.
        state_bytes: bytes of the KV cache's memory that hold states.
        is_on_cpu: whether the pool is in the machine's memory.
        plan: of this memory, which a container limits; None without a limit.

    Raises:
        ConfigurationError: the pool cannot hold one request of `max_model_len`, or does not fit the
            limit; names the flags to change and their values.
    """
    blocks_per_request = spec.blocks_for(max_model_len)
    block_bytes = layout.block_bytes + draft_block_bytes
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = max(0, config.kv_cache_memory_bytes - state_bytes) // block_bytes
    else:
        num_blocks = max(0, free_bytes - state_bytes) // block_bytes
        if is_on_cpu:
            num_blocks = min(num_blocks, config.max_step_seqs * blocks_per_request)
    if plan is not None:
        if is_on_cpu:
            needed = max(num_blocks, blocks_per_request)
            remedy = _how_to_fit(config, plan, blocks_per_request, block_bytes)
            plan.check(needed * block_bytes + state_bytes, remedy)
        else:
            plan.check(0, " or ".join(f"lower {flag}" for flag in plan.lowered_by))
        plan.log(num_blocks * block_bytes + state_bytes if is_on_cpu else 0)
    if num_blocks < blocks_per_request:
        raise _too_small(config, block_bytes, state_bytes, spec, max_model_len, num_blocks)
    return num_blocks


def _how_to_fit(config: EngineConfig, plan: MemoryPlan, least_blocks: int, block_bytes: int) -> str:
    """Returns flags to set instead of raising the limit of memory.

    Args:
        config: the flags.
        plan: what the limit leaves for the pool.
        least_blocks: what the longest request needs.
        block_bytes: size of a block.
    """
    num_blocks = plan.left // block_bytes
    if num_blocks < least_blocks:
        lower = [*plan.lowered_by, "--max-model-len", "--max-num-seqs"]
        return f"set {', '.join(lower)} or --max-num-batched-tokens lower"
    if config.num_gpu_blocks_override is not None:
        return f"set --num-gpu-blocks-override to at most {num_blocks}"
    return f"set --kv-cache-memory-bytes to at most {plan.left // _MEBIBYTE}MiB"


def decide_num_host_blocks(
    config: EngineConfig,
    layout: KvLayout,
    num_blocks: int,
    device: torch.device,
    plan: MemoryPlan | None = None,
) -> int:
    """Returns the number of host blocks: those that fit in `swap_space`, at most `num_blocks`.

    Raises:
        ConfigurationError: it is 0, but `preemption_mode` is "swap"; names the flag.
    """
    space = config.swap_space
    if space is None:
        space = _DEFAULT_SWAP_BYTES if device.type == "cuda" else 0
        space = space if plan is None else min(space, plan.left)
    num_host_blocks = min(space // layout.block_bytes, num_blocks)
    if config.preemption_mode == "swap" and not num_host_blocks:
        whole_pool = -(-num_blocks * layout.block_bytes // _MEBIBYTE)
        raise ConfigurationError(
            f"--swap-space is {space} bytes; --preemption-mode swap needs at least one block of "
            f"{layout.block_bytes} bytes, and --swap-space {whole_pool}MiB holds the whole KV cache"
        )
    return num_host_blocks


def allocate_pool(num_blocks: int, layout: KvLayout, device: torch.device) -> torch.Tensor:
    """Returns the pool, zeroed, because a kernel may multiply an unused slot by 0, and 0 * NaN
    is NaN.

    Raises:
        ConfigurationError: the device does not have that much memory.
    """
    shape, dtype = (num_blocks, *layout.block_shape), getattr(torch, layout.pool_dtype)
    try:
        if device.type == "cpu":
            return kernels.fresh_zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError, OSError) as error:  # torch.OutOfMemoryError: a RuntimeError
        raise ConfigurationError(
            f"cannot allocate a KV cache of {num_blocks * layout.block_bytes // _MEBIBYTE} MiB "
            f"on {device}; set --kv-cache-memory-bytes lower"
        ) from error


def allocate_host_pool(num_blocks: int, layout: KvLayout, device: torch.device) -> torch.Tensor:
    """Returns the host pool, `[num_blocks, *layout.block_shape]`, pinned if `device` is a GPU.

    Raises:
        ConfigurationError: the host does not have that much memory.
    """
    return _host_memory((num_blocks, *layout.block_shape), layout.pool_dtype, device)


def allocate_host_slots(num_slots: int, slot_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns the slots of the host pool, `[num_slots, slot_bytes]` uint8; otherwise as
    `allocate_host_pool`.
    """
    return _host_memory((num_slots, slot_bytes), "uint8", device)


def _host_memory(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    try:
        is_pinned = device.type == "cuda"
        return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=is_pinned)
    except (RuntimeError, MemoryError) as error:
        num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        raise ConfigurationError(
            f"cannot allocate {num_bytes // _MEBIBYTE} MiB on the host for swapped KV; "
            "set --swap-space lower"
        ) from error


def log_pool(
    num_blocks: int, num_host_blocks: int, layout: KvLayout, spec: KvCacheSpec, max_model_len: int
) -> None:
    """Logs the sizes of the pools."""
    logger.info(
        "KV cache: %d blocks of %d tokens, %d tokens, %.1f MiB; "
        "maximum concurrency at %d tokens per request: %.2f",
        num_blocks,
        layout.block_size,
        num_blocks * layout.block_size // len(spec.windows),
        num_blocks * layout.block_bytes / _MEBIBYTE,
        max_model_len,
        num_blocks / spec.blocks_for(max_model_len),
    )
    if num_host_blocks:
        size_mib = num_host_blocks * layout.block_bytes / _MEBIBYTE
        logger.info("host pool for swapped KV: %d blocks, %.1f MiB", num_host_blocks, size_mib)


def _too_small(
    config: EngineConfig,
    block_bytes: int,
    state_bytes: int,
    spec: KvCacheSpec,
    max_model_len: int,
    num_blocks: int,
) -> ConfigurationError:
    blocks_per_request = spec.blocks_for(max_model_len)
    if config.num_gpu_blocks_override is not None:
        enlarge = f"--num-gpu-blocks-override {blocks_per_request}"
    else:
        needed_bytes = blocks_per_request * block_bytes + state_bytes
        enlarge = f"--kv-cache-memory-bytes {-(-needed_bytes // _MEBIBYTE)}MiB"
    num_tokens = spec.max_tokens(num_blocks, max_model_len)
    shorten = f" or set --max-model-len {num_tokens}" if num_tokens else ""
    whose = "--max-model-len is" if config.max_model_len is not None else "the model's length is"
    return ConfigurationError(
        f"the KV cache holds {num_tokens} tokens, but {whose} {max_model_len}; "
        f"set {enlarge}{shorten}"
    )
