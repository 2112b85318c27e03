"""`Pools`: the KV pool of a runner and its host pool, sized and allocated."""

import time
from dataclasses import dataclass
from typing import Self

import torch

import kernels
from engine.config import EngineConfig
from engine.kv_cache.spec import spec_of
from engine.runner import ModelInfo
from engine.runtime.device import wait_for
from engine.runtime.drafting.drafter import Drafter
from engine.runtime.forward.memory_plan import MemoryPlan
from engine.runtime.kv_pool import (
    allocate_host_pool,
    allocate_host_slots,
    allocate_pool,
    decide_num_blocks,
    decide_num_host_blocks,
    default_cpu_bytes,
    log_pool,
)
from engine.runtime.rank_batches import check_same_pools, least_of_all
from engine.runtime.state_pool import (
    StateMemory,
    decide_num_host_slots,
    decide_num_slots,
    log_slots,
    num_region_blocks,
)
from kernels import EngineRanks
from kvstore.layout import KvLayout, StateLayout

__all__ = ["Pools"]

_MEBIBYTE = 2**20
_TIMED_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Pools:
    """The blocks of one runner.

    Attributes:
        num_blocks: number of blocks in the pool.
        num_host_blocks: number of blocks in the host pool.
        num_slots: number of slots for states.
        whole: the pool: `num_blocks` blocks, those that hold the slots, and spare blocks,
            `[number of all, *layout.block_shape]`; the steps use the spare ones.
        kv: the pool without spare blocks.
        host: the host pool.
        states: the slots, and as many spare ones as spare blocks; None for a model without.
        host_slots: slots in the host pool, `[num_host_slots, slot_bytes]`.
    """

    num_blocks: int
    num_host_blocks: int
    num_slots: int
    whole: torch.Tensor
    kv: torch.Tensor
    host: torch.Tensor
    states: StateMemory | None
    host_slots: torch.Tensor

    @classmethod
    def make(
        cls,
        config: EngineConfig,
        info: ModelInfo,
        layout: KvLayout,
        states: StateLayout | None,
        device: torch.device,
        *,
        free_bytes: int | None,
        num_spare_blocks: int,
        plan: MemoryPlan | None,
        drafter: Drafter | None,
        ranks: EngineRanks | None,
    ) -> Self:
        """Sizes and allocates the pools, and those of a draft model.

        Args:
            config: the flags.
            info: the whole model's facts.
            layout: of a block of this rank.
            states: of a slot of this rank; None for a model without states.
            device: where the pool is.
            free_bytes: bytes left on a GPU; None on a CPU.
            num_spare_blocks: blocks that steps need behind those of the pool.
            plan: the memory of the worker; None without a limit.
            drafter: the draft model; None without one.
            ranks: all ranks of the engine, whose pools are equal; None for one rank.
        """
        spec, max_len = spec_of(config, info), info.max_model_len
        num_bytes = default_cpu_bytes(plan) if free_bytes is None else free_bytes
        if free_bytes is not None and drafter is not None:
            num_bytes = max(0, free_bytes - drafter.fixed_bytes)
        if ranks is not None:
            num_bytes = least_of_all(ranks, num_bytes // _MEBIBYTE, device) * _MEBIBYTE
        draft_block_bytes = drafter.block_bytes if drafter else 0
        is_on_cpu = free_bytes is None
        max_blocks = config.max_step_seqs * spec.blocks_for(max_len) if is_on_cpu else None
        num_slots = decide_num_slots(
            config, states, layout.block_bytes + draft_block_bytes, num_bytes, max_blocks
        )
        num_state_blocks = num_region_blocks(states, layout, num_slots + num_spare_blocks)
        num_blocks = decide_num_blocks(
            config,
            layout,
            spec,
            max_len,
            num_bytes,
            draft_block_bytes=draft_block_bytes,
            state_bytes=num_state_blocks * layout.block_bytes,
            is_on_cpu=is_on_cpu,
            plan=plan,
        )
        num_host_blocks = decide_num_host_blocks(config, layout, num_blocks, device, plan)
        if ranks is not None:
            check_same_pools(ranks, num_blocks, num_host_blocks, num_slots)
        whole = allocate_pool(num_blocks + num_state_blocks + num_spare_blocks, layout, device)
        kernels.copy_blocks(whole[:num_blocks], ((0, num_blocks - 1),))  # compiles it
        host = allocate_host_pool(num_host_blocks, layout, device)
        if drafter is not None:
            drafter.allocate(num_blocks)
        log_pool(num_blocks, num_host_blocks, layout, spec, max_len)
        memory, host_slots = None, torch.empty(0, 0, dtype=torch.uint8)
        if states is not None:
            region = whole[num_blocks : num_blocks + num_state_blocks]
            memory = StateMemory.of(region, states, len(info.windows))
            num_host_slots = decide_num_host_slots(num_slots, num_blocks, num_host_blocks)
            host_slots = allocate_host_slots(num_host_slots, states.slot_bytes, device)
            assert spec.states is not None
            log_slots(states, num_slots, spec.states.interval)
        kv = whole[: num_blocks + num_state_blocks]
        return cls(num_blocks, num_host_blocks, num_slots, whole, kv, host, memory, host_slots)

    def time_swapped_block(self, device: torch.device) -> float:
        """Measures the seconds to copy one block to the host; 0 without a host pool."""
        num_blocks = min(_TIMED_BLOCKS, self.num_host_blocks)
        if not num_blocks:
            return 0.0
        pool, pairs = self.kv, tuple((block, block) for block in range(num_blocks))
        kernels.swap_blocks(pool, self.host, pairs)  # warms up
        wait_for(device)
        start = time.perf_counter()
        kernels.swap_blocks(pool, self.host, pairs)
        wait_for(device)
        return (time.perf_counter() - start) / num_blocks
