"""Shapes, sizes and views of KV blocks of each data type."""

import pytest
import torch

from kvstore.layout import NARROW_DTYPES, KvLayout
from kvstore.mover.pool_objects import view_blocks

_SIZES = {"num_layers": 3, "num_kv_heads": 2, "block_size": 8, "head_dim": 6}


def _layout(dtype, **sizes):
    return KvLayout(**(_SIZES | sizes), dtype=dtype)


def _distinct_blocks(layout, num_blocks):
    """Returns blocks whose bytes count up modulo 251."""
    count = torch.arange(num_blocks * layout.block_bytes) % 251
    pool = count.to(torch.uint8).view(getattr(torch, layout.pool_dtype))
    return pool.view(num_blocks, *layout.block_shape)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_plain_block_consists_of_its_elements(dtype, width):
    layout = _layout(dtype)
    assert layout.block_shape == (3, 2, 2, 8, 6)
    assert layout.block_bytes == 3 * 2 * 2 * 8 * 6 * width
    blocks = _distinct_blocks(layout, 2)
    views = view_blocks(blocks, layout)
    assert views.states is blocks
    assert views.scales is None


@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_8_bit_block_has_half_the_bytes_plus_its_scales(head_dim):
    sizes = {"block_size": 16, "head_dim": head_dim}
    plain, narrow = _layout("bfloat16", **sizes), _layout("fp8_e4m3", **sizes)
    num_vectors = 3 * 2 * 2 * 16
    assert narrow.block_bytes == plain.block_bytes // 2 + 4 * num_vectors
    assert narrow.block_bytes / plain.block_bytes == 0.5 + 2 / head_dim


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_elements_and_scales_cover_every_byte(dtype):
    layout = _layout(dtype)
    blocks = _distinct_blocks(layout, 5)
    views = view_blocks(blocks, layout)
    assert views.states.shape == (5, 3, 2, 2, 8, 6)
    assert views.states.dtype is getattr(torch, NARROW_DTYPES[dtype])
    assert views.scales.shape == (5, 3, 2, 2, 8)
    assert views.scales.dtype is torch.float32
    elements, factors = (view.view(torch.uint8) for view in (views.states, views.scales))
    together = torch.cat([elements.flatten(-2), factors.flatten(-1)], dim=-1)
    assert torch.equal(together, blocks)


def test_writes_to_views_change_their_blocks_alone():
    layout = _layout("fp8_e4m3")
    pool = _distinct_blocks(layout, 4)
    before = pool.clone()
    for block in (pool[2], pool[3]):
        views = view_blocks(block, layout)
        views.states.fill_(1.0)
        views.scales.fill_(2.0)
    assert torch.equal(pool[:2], before[:2])
    assert torch.equal(pool[2], pool[3])
    assert (view_blocks(pool, layout).scales[2:] == 2).all()
    assert (view_blocks(pool, layout).states[2:].float() == 1).all()
