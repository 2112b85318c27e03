"""Writing and reading a KV cache of 8-bit elements with scales, in a pool full of NaN."""

from dataclasses import replace

import pytest
import torch

import kernels
from kernels import reference
from kernels.reference.cache import quantize_kv
from kvstore.layout import NARROW_DTYPES, KvLayout
from kvstore.mover.pool_objects import view_blocks
from tests.support.kernel_checks import DTYPES, eps_of, normal
from tests.support.paged_batches import shuffled_tables, step_metadata

_LAYER = 1
_HEADS, _SCALE = (6, 2), 0.3
_STEPS = {
    "decode": [(0, 1), (7, 1), (40, 1), (3, 1)],
    "prompt": [(0, 13)],
    "mixed": [(12, 1), (0, 9), (5, 6), (8, 1)],
}


def _new_pool(num_blocks, block_size, head_dim, narrow_dtype):
    layout = KvLayout(3, _HEADS[1], block_size, head_dim, narrow_dtype)
    pool = torch.full((num_blocks, *layout.block_shape), 0xFF, dtype=torch.uint8)
    return view_blocks(pool, layout)


def _write(views, key, value, meta):
    query = torch.zeros(len(key), _HEADS[0], key.shape[2], dtype=key.dtype)
    cache, scales = views.states[:, _LAYER], views.scales[:, _LAYER]
    kernels.rotate_and_write_kv(query, key, value, cache, meta, kv_scales=scales)


@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("narrow_dtype", NARROW_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", _STEPS)
def test_attention_reads_the_rounded_cache(step, dtype, narrow_dtype, sliding_window):
    spans, block_size, head_dim = _STEPS[step], 4, 16
    tables, num_blocks = shuffled_tables([sum(span) for span in spans], block_size, seed=1)
    views = _new_pool(num_blocks, block_size, head_dim, narrow_dtype)
    rounded = torch.full(views.states[:, _LAYER].shape, torch.nan, dtype=dtype)
    for seed, ((start, length), table) in enumerate(zip(spans, tables, strict=True)):
        _, whole = step_metadata([(0, start + length)], [table], block_size)
        kv = normal(2, start + length, _HEADS[1], head_dim, dtype=dtype, seed=seed)
        narrow, scales = quantize_kv(kv, views.states.dtype)
        kept = (narrow.float() * scales.unsqueeze(-1)).to(dtype)
        reference.rotate_and_write_kv(kv[0], *kept, rounded, whole)
        _write(views, *kv, whole)
    _, meta = step_metadata(spans, tables, block_size)
    query = normal(sum(length for _, length in spans), _HEADS[0], head_dim, dtype=dtype, seed=9)
    rule = {"scale": _SCALE, "sliding_window": sliding_window}
    output = kernels.paged_attention(
        query, views.states[:, _LAYER], meta, kv_scales=views.scales[:, _LAYER], **rule
    )
    assert output.dtype is dtype
    expected = reference.paged_attention(query, rounded, meta, **rule)
    tolerance = 4 * eps_of(dtype)
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert output.isfinite().all()


@pytest.mark.parametrize("num_heads", [2, 40], ids=["few rows", "many rows"])
@pytest.mark.parametrize("narrow_dtype", NARROW_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_read_as_its_number(dtype, narrow_dtype, num_heads):
    """One sequence of two tokens, whose K are 0 and one number, for each number."""
    views = _new_pool(1, 16, 32, narrow_dtype)
    states, scales = views.states[:, _LAYER], views.scales[:, _LAYER]
    states.view(torch.uint8).fill_(0)
    scales.fill_(1.0)
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(states.dtype)
    numbers = numbers[numbers.float().isfinite() & (numbers.float().abs() > 0)]
    query = torch.zeros(1, num_heads, 32, dtype=dtype)
    _, meta = step_metadata([(1, 1)], [[0]], 16)
    for number in numbers:
        states[0, 0, :, 1, 5] = number
        states[0, 1, :, 1] = number
        value = number.double().item()
        query[..., 5] = 1.0 if value > 0 else -1.0
        output = kernels.paged_attention(
            query, states, meta, scale=1 / abs(value), kv_scales=scales
        )
        share = torch.tensor([0.0, 1.0]).double().softmax(0)[1]
        expected = torch.full_like(output, share * value)
        torch.testing.assert_close(output, expected, atol=0, rtol=4 * eps_of(dtype))


@pytest.mark.parametrize("narrow_dtype", NARROW_DTYPES)
def test_a_step_writes_its_slots_and_no_others(narrow_dtype):
    views = _new_pool(5, 4, 3, narrow_dtype)
    tokens = normal(2, 6, _HEADS[1], 3)
    slots = torch.tensor([7, 0, 19, 4, 12, 13])
    _, meta = step_metadata([(0, 6)], [[0, 1]], 4)
    _write(views, *tokens, replace(meta, slot_mapping=slots))
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, 4)
        states = views.states[block, _LAYER, :, :, offset]
        scales = views.scales[block, _LAYER, :, :, offset]
        narrow, factors = quantize_kv(tokens[:, token], states.dtype)
        assert torch.equal(states.view(torch.uint8), narrow.view(torch.uint8))
        assert torch.equal(scales, factors)
        states.view(torch.uint8).fill_(0xFF)
        scales.fill_(torch.nan)
    assert views.scales.isnan().all()
    assert (views.states.view(torch.uint8) == 0xFF).all()
