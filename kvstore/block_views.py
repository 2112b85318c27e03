"""K, V and their factors, as tensors over the bytes of blocks; see `kvstore.layout`."""

from dataclasses import dataclass

import torch

from kvstore.layout import KvLayout

__all__ = ["BlockViews", "view_blocks"]


@dataclass(frozen=True, slots=True)
class BlockViews:
    """Blocks as kernels take them: views, which a change of the blocks changes.

    Attributes:
        states: `[..., num_layers, 2, num_kv_heads, block_size, head_dim]`, K and V.
        scales: `[..., num_layers, 2, num_kv_heads, block_size]` float32, the factor on each
            vector of `states`; None where they need none.
    """

    states: torch.Tensor
    scales: torch.Tensor | None


def view_blocks(blocks: torch.Tensor, layout: KvLayout) -> BlockViews:
    """Takes blocks apart without a copy.

    Args:
        blocks: `[..., *layout.block_shape]` of `layout.pool_dtype`, contiguous; a block begins
            at a multiple of 4 bytes, as do factors within it: `block_size * head_dim` is one.
        layout: of a block.
    """
    if not layout.has_scales:
        return BlockViews(blocks, None)
    num_elements = layout.block_size * layout.head_dim
    states = blocks[..., :num_elements].view(torch.float8_e4m3fn)
    scales = blocks[..., num_elements:].view(torch.float32)
    return BlockViews(states.view(*scales.shape, layout.head_dim), scales)
