"""Tensor primitives behind one dispatch. `kernels.reference` is the oracle.

Each function here has the signature and meaning of its namesake in
`kernels.reference`, and runs the one of the module that serves the tensors'
device. To add kernels for a device, write a module with the same names (it may
import what it does not speed up from the reference) and enter it below.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType

import torch

from kernels import reference
from kernels.attention_metadata import AttentionMetadata
from kernels.paged_kv import LayerKv, PagedKv

__all__ = [
    "AttentionMetadata",
    "LayerKv",
    "PagedKv",
    "apply_rotary",
    "copy_blocks",
    "gather_blocks",
    "paged_attention",
    "rms_norm",
    "scatter_blocks",
    "silu_and_mul",
    "swap_blocks",
    "write_kv",
]

_BY_DEVICE_TYPE: Mapping[str, ModuleType] = MappingProxyType(
    {
        "cpu": reference,
        "cuda": reference,
    }
)


def _kernels_for(tensor: torch.Tensor) -> ModuleType:
    return _BY_DEVICE_TYPE.get(tensor.device.type, reference)


def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes each token's K and V into its slot; see `reference.write_kv`."""
    _kernels_for(key).write_kv(key, value, kv_layer, slot_mapping)


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention over paged KV; see `reference.paged_attention`."""
    attend = _kernels_for(query).paged_attention
    output: torch.Tensor = attend(query, kv_layer, meta, scale=scale, sliding_window=sliding_window)
    return output


def gather_blocks(
    pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, out: torch.Tensor
) -> None:
    """Copies blocks out of the pool; see `reference.gather_blocks`."""
    _kernels_for(pool).gather_blocks(pool, block_ids, out)


def scatter_blocks(
    source: torch.Tensor, pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor
) -> None:
    """Copies blocks into the pool; see `reference.scatter_blocks`."""
    _kernels_for(pool).scatter_blocks(source, pool, block_ids)


def copy_blocks(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks within the pool; see `reference.copy_blocks`."""
    _kernels_for(pool).copy_blocks(pool, pairs)


def swap_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copies blocks from one pool to another; see `reference.swap_blocks`."""
    _kernels_for(source).swap_blocks(source, target, pairs)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm; see `reference.rms_norm`."""
    normed: torch.Tensor = _kernels_for(hidden).rms_norm(hidden, weight, eps)
    return normed


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding; see `reference.apply_rotary`."""
    rotated: torch.Tensor = _kernels_for(states).apply_rotary(states, cos, sin)
    return rotated


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gated activation; see `reference.silu_and_mul`."""
    activated: torch.Tensor = _kernels_for(gate_up).silu_and_mul(gate_up)
    return activated
