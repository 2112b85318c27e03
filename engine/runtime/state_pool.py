"""Slots for the states of recurrent layers: their number, and their memory.

The slots lie in whole blocks of the KV pool, behind the blocks for tokens, so that the pool is one
piece of memory. `StateLayout` says how the states of all recurrent layers lie in a slot.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.models.config import ModelConfig
from kvstore.layout import KvLayout, StateLayout, StatePart

__all__ = [
    "StateMemory",
    "decide_num_host_slots",
    "decide_num_slots",
    "log_slots",
    "num_region_blocks",
    "split_pairs",
    "state_layout",
]

_SLOTS_PER_SEQUENCE = 3  # the current one, one to go back to, and one that takes its place
_MIN_SLOTS = 3
_SNAPSHOT_SHARE = 4  # of the KV cache's bytes, one in so many holds states that others begin at
_MAX_SHARE = 2
_MEBIBYTE = 2**20

_logger = logging.getLogger("baton.engine")

Pairs = tuple[tuple[int, int], ...]


def state_layout(config: ModelConfig, dtype: str) -> StateLayout | None:
    """Returns the layout of a model's slots; None if it has no recurrent layers.

    Args:
        config: the model's shape.
        dtype: the type of its weights.
    """
    if not config.recurrent_layers:
        return None
    parts = [
        StatePart(shape.name, shape.num_heads, shape.width, shape.dtype or dtype)
        for shape in config.state_shapes
    ]
    return StateLayout(len(config.recurrent_layers), tuple(parts))


def num_region_blocks(states: StateLayout | None, layout: KvLayout, num_slots: int) -> int:
    """Returns how many blocks of the pool hold so many slots."""
    return 0 if states is None else -(-num_slots * states.slot_bytes // layout.block_bytes)


def decide_num_slots(
    config: EngineConfig,
    states: StateLayout | None,
    block_bytes: int,
    num_bytes: int,
    max_blocks: int | None,
) -> int:
    """Returns the number of slots.

    Unless a flag says it, these are three for each sequence that may run, and as many others as
    fit in a quarter of the KV cache's memory, but no more than blocks; all in all at most half of
    that memory, and at least three.

    Args:
        config: the flags.
        states: the layout of a slot; None for a model without states.
        block_bytes: size of a block.
        num_bytes: the KV cache's memory, slots included, unless a flag says it.
        max_blocks: the most blocks that the pool will have; None without such a bound.
    """
    if states is None:
        return 0
    if config.num_state_slots is not None:
        return config.num_state_slots
    if config.num_gpu_blocks_override is not None:
        num_bytes = config.num_gpu_blocks_override * block_bytes
    elif config.kv_cache_memory_bytes is not None:
        num_bytes = config.kv_cache_memory_bytes
    num_blocks = num_bytes // block_bytes
    if max_blocks is not None:
        num_blocks = min(num_blocks, max_blocks)
    num_snapshots = min(num_bytes // _SNAPSHOT_SHARE // states.slot_bytes, num_blocks)
    num_wanted = _SLOTS_PER_SEQUENCE * config.max_running + num_snapshots
    return max(_MIN_SLOTS, min(num_wanted, num_bytes // _MAX_SHARE // states.slot_bytes))


def decide_num_host_slots(num_slots: int, num_blocks: int, num_host_blocks: int) -> int:
    """Returns the number of slots in the host pool: in the proportion of the blocks, and at least
    one if there are blocks.
    """
    return -(-num_slots * num_host_blocks // num_blocks)


def log_slots(states: StateLayout, num_slots: int, interval: int) -> None:
    """Logs the number of slots, and how much of their memory holds no states."""
    _logger.info(
        "states of recurrent layers: %d bytes of a sequence, %d slots, %.1f MiB, %.0f%% of it "
        "unused; a running sequence keeps one every %d tokens",
        states.slot_bytes,
        num_slots,
        num_slots * states.slot_bytes / _MEBIBYTE,
        100 * (1 - states.state_bytes / states.slot_bytes),
        interval,
    )


def split_pairs(pairs: Pairs, first_source: int, first_target: int) -> tuple[Pairs, Pairs]:
    """Returns the pairs of blocks, and those of slots by the numbers of these.

    Args:
        pairs: (source, target) ids.
        first_source: id of the first slot among the sources.
        first_target: id of the first slot among the targets.
    """
    blocks = tuple([pair for pair in pairs if pair[0] < first_source])
    slots = [(s - first_source, t - first_target) for s, t in pairs if s >= first_source]
    return blocks, tuple(slots)


@dataclass(frozen=True, slots=True)
class StateMemory:
    """The memory of slots.

    Attributes:
        slots: `[num_slots, slot_bytes]` uint8.
        layers: per recurrent layer, `LayerState.parts`: views of `slots`.
        layer_group: number of the layer group whose tables name slots.
    """

    slots: torch.Tensor
    layers: Sequence[tuple[torch.Tensor, ...]]
    layer_group: int

    @classmethod
    def of(cls, region: torch.Tensor, states: StateLayout, layer_group: int) -> "StateMemory":
        """Returns as many slots as fit in blocks.

        Args:
            region: whole blocks of the pool, contiguous.
            states: the layout of a slot.
            layer_group: as the attribute.
        """
        region_bytes = region.reshape(-1).view(torch.uint8)
        num_slots = region_bytes.numel() // states.slot_bytes
        slots = region_bytes[: num_slots * states.slot_bytes].view(num_slots, -1)
        layers_per_slice = states.num_layers // states.num_layer_slices
        slices = slots.view(len(slots), -1, states.num_head_slices, states.slice_bytes)
        layers = [
            tuple(
                _part_view(
                    slices[:, layer // layers_per_slice],
                    layer % layers_per_slice * states.layer_bytes + offset,
                    part,
                )
                for part, offset in zip(states.parts, states.part_offsets, strict=True)
            )
            for layer in range(states.num_layers)
        ]
        return cls(slots, layers, layer_group)


def _part_view(slices: torch.Tensor, offset: int, part: StatePart) -> torch.Tensor:
    """Returns a part of a layer's states in all slots.

    Args:
        slices: `[num_slots, head_slices, slice_bytes]`, those with the layer.
        offset: byte in a slice at which the part begins.
        part: of all heads.

    Returns:
        `[num_slots, head_slices, heads_per_slice, width]`.
    """
    num_bytes = part.num_bytes // slices.shape[1]
    elements = slices[..., offset : offset + num_bytes].view(getattr(torch, part.dtype))
    return elements.view(*elements.shape[:2], -1, part.width)
