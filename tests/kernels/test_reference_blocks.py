"""Block copies, bit for bit, and the small elementwise primitives."""

from functools import partial

import pytest
import torch

import kernels
from kernels import dispatch, reference
from kernels.reference.pointwise import apply_rotary

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_pool(dtype, num_blocks=9, shape=(3, 2, 1, 3, 5)):
    """A pool of random bits: NaN, infinities and denormals among them."""
    words = torch.randint(-(2**31), 2**31 - 1, (num_blocks, 90), dtype=torch.int32)
    return words[:, : 90 * dtype.itemsize // 4].contiguous().view(dtype).view(num_blocks, *shape)


def bits(tensor):
    return tensor.contiguous().view(len(tensor), -1).view(torch.uint8)


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_blocks_scatter_back_bit_for_bit(dtype, as_bytes):
    pool, other = random_pool(dtype), random_pool(dtype)
    ids = [7, 0, 3, 8]
    staging_type = torch.uint8 if as_bytes else dtype
    row_elements = bits(pool).shape[1] // staging_type.itemsize
    staging = torch.empty(6, row_elements, dtype=staging_type)[1:5]
    kernels.gather_blocks(pool, ids, staging)
    assert torch.equal(bits(staging), bits(pool)[ids])

    before, target_ids = bits(other).clone(), torch.tensor([1, 2, 6, 5])
    kernels.scatter_blocks(staging, other, target_ids)
    before[target_ids] = bits(pool)[ids]
    assert torch.equal(bits(other), before)


def test_rows_may_be_strided():
    pool, other = random_pool(torch.bfloat16), random_pool(torch.bfloat16)
    slots = torch.zeros(3, 64 + 180, dtype=torch.uint8)
    kernels.gather_blocks(pool, [7, 0, 3], slots[:, 64:])
    kernels.scatter_blocks(slots[:, 64:], other, [1, 5, 2])

    assert not slots[:, :64].any()
    assert torch.equal(slots[:, 64:], bits(pool)[[7, 0, 3]])
    assert torch.equal(bits(other)[[1, 5, 2]], bits(pool)[[7, 0, 3]])


def test_a_block_may_be_gathered_twice():
    pool = random_pool(torch.float32)
    out = torch.empty(2, 90)
    kernels.gather_blocks(pool, [4, 4], out)
    assert torch.equal(bits(out), bits(pool)[[4, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_read_before_they_write(dtype):
    pool = random_pool(dtype)
    before = bits(pool).clone()
    kernels.copy_blocks(pool, [(0, 5), (5, 2), (0, 8)])
    expected = before.clone()
    expected[[5, 2, 8]] = before[[0, 5, 0]]
    assert torch.equal(bits(pool), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_blocks_arrive_bit_for_bit(dtype):
    pool, host = random_pool(dtype), random_pool(dtype, num_blocks=4)
    expected = bits(host).clone()
    expected[[3, 0, 1]] = bits(pool)[[8, 0, 8]]
    kernels.swap_blocks(pool, host, [(8, 3), (0, 0), (8, 1)])
    assert torch.equal(bits(host), expected)


def test_an_empty_list_of_copies_changes_nothing():
    pool = random_pool(torch.float32)
    before = bits(pool).clone()
    kernels.copy_blocks(pool, [])
    assert torch.equal(bits(pool), before)


def test_a_pool_that_is_not_contiguous_is_refused():
    with pytest.raises(RuntimeError, match="view"):
        kernels.gather_blocks(torch.zeros(4, 4, 4).transpose(0, 2), [0], torch.empty(1, 16))


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 33)])
def test_rms_norm(shape):
    hidden, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    wide = hidden.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(
        reference.rms_norm(hidden, weight, 1e-5).double(), expected, atol=1e-6, rtol=1e-6
    )


def test_rms_norm_of_large_half_precision_values_does_not_overflow():
    hidden = torch.full((1, 8), 6e4, dtype=torch.float16)
    normed = reference.rms_norm(hidden, torch.ones(8, dtype=torch.float16), 1e-6)
    assert torch.equal(normed, torch.ones_like(normed))


def test_rotary_rotates_pairs_by_their_angle():
    states = torch.randn(4, 3, 6)
    angles = torch.randn(4, 3)
    turned = apply_rotary(states, angles.cos(), angles.sin())
    pairs = torch.complex(*states.double().chunk(2, dim=-1))
    expected = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    torch.testing.assert_close(
        turned.double(), torch.cat([expected.real, expected.imag], -1), atol=1e-6, rtol=1e-6
    )


def test_swaps_use_the_kernels_of_the_pool_that_is_on_a_gpu(monkeypatch):
    devices = []
    for device in ("cpu", "meta"):
        record = partial(_append, devices, device)
        monkeypatch.setitem(dispatch.KERNELS["swap_blocks"], (device, None), record)
    host, other = torch.zeros(2, 4), torch.zeros(2, 4, device="meta")
    for source, target in ((host, other), (other, host), (host, host)):
        kernels.swap_blocks(source, target, ())
    assert devices == ["meta", "meta", "cpu"]


def _append(devices, device, *_):
    devices.append(device)
