"""Block copies in Triton, bit for bit."""

import pytest
import torch

from kernels.triton import blocks
from tests.support.devices import DEVICE, IS_CUDA

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
# 90 words end within a program's first part, and 4110 within its second.
BLOCK_WORDS = [1, 90, 4096, 4110]


def random_pool(dtype=torch.float32, block_words=90, num_blocks=9):
    """A pool of random bits: NaN, infinities and denormals among them."""
    words = torch.randint(-(2**31), 2**31 - 1, (num_blocks, block_words), dtype=torch.int32)
    return words.to(DEVICE).view(dtype).view(num_blocks, 2, -1)


def bits(tensor):
    return tensor.contiguous().view(len(tensor), -1).view(torch.uint8).cpu()


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("block_words", BLOCK_WORDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_blocks_scatter_back_bit_for_bit(dtype, block_words, as_bytes):
    if dtype.itemsize == 4 and block_words == 1:
        pytest.skip("K and V are two elements at least")
    pool, other = (random_pool(dtype, block_words) for _ in range(2))
    ids = [7, 0, 3, 8]
    staging_type = torch.uint8 if as_bytes else dtype
    row_elements = bits(pool).shape[1] // staging_type.itemsize
    staging = torch.empty(6, row_elements, dtype=staging_type, device=DEVICE)
    untouched = bits(staging)[[0, 5]]
    blocks.gather_blocks(pool, ids, staging[1:5])
    assert torch.equal(bits(staging[1:5]), bits(pool)[ids])
    assert torch.equal(bits(staging)[[0, 5]], untouched)

    before, target_ids = bits(other).clone(), [1, 2, 6, 5]
    blocks.scatter_blocks(staging[1:5], other, target_ids)
    before[target_ids] = bits(pool)[ids]
    assert torch.equal(bits(other), before)


@pytest.mark.parametrize("header_bytes", [4, 64])
def test_rows_may_be_strided(header_bytes):
    pool, other = random_pool(), random_pool()
    slots = torch.full((3, header_bytes + 360), 9, dtype=torch.uint8, device=DEVICE)
    blocks.gather_blocks(pool, [7, 0, 3], slots[:, header_bytes:])
    assert torch.equal(slots[:, header_bytes:].cpu(), bits(pool)[[7, 0, 3]])
    assert (slots[:, :header_bytes] == 9).all()
    blocks.scatter_blocks(slots[:, header_bytes:], other, [5, 6, 1])
    assert torch.equal(bits(other)[[5, 6, 1]], bits(pool)[[7, 0, 3]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_be_a_tensor_on_any_device(dtype):
    pool, out = random_pool(), torch.empty(3, 90, device=DEVICE)
    for device in (DEVICE, "cpu"):
        ids = torch.tensor([4, 4, 2], dtype=dtype, device=device)
        blocks.gather_blocks(pool, ids, out.fill_(1))
        assert torch.equal(bits(out), bits(pool)[[4, 4, 2]])
    blocks.scatter_blocks(out[1:], pool, torch.tensor([8, 0], dtype=dtype, device=DEVICE))
    assert torch.equal(bits(pool)[[8, 0]], bits(out)[1:])


@pytest.mark.skipif(not IS_CUDA, reason="the host is another device only with a GPU")
@pytest.mark.parametrize("pinned", [False, True])
def test_blocks_travel_to_the_host_and_back(pinned):
    pool, other = random_pool(), random_pool()
    slots = torch.full((3, 64 + 360), 9, dtype=torch.uint8, pin_memory=pinned)
    blocks.gather_blocks(pool, [7, 0, 3], slots[:, 64:])
    assert torch.equal(slots[:, 64:], bits(pool)[[7, 0, 3]])
    blocks.scatter_blocks(slots[:, 64:], other, [5, 6, 1])
    assert torch.equal(bits(other)[[5, 6, 1]], bits(pool)[[7, 0, 3]])


@pytest.mark.parametrize("block_words", [90, 4110])
@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 5), (3, 2), (0, 8)],
        [(0, 5), (5, 2), (0, 8)],
        [(1, 2), (2, 1)],
        [(4, 4), (1, 3)],
        [(index, index + 1) for index in range(8)],
    ],
)
def test_copies_read_before_they_write(pairs, block_words):
    pool = random_pool(torch.bfloat16, block_words)
    expected, before = bits(pool).clone(), bits(pool).clone()
    for source, target in pairs:
        expected[target] = before[source]
    blocks.copy_blocks(pool, pairs)
    assert torch.equal(bits(pool), expected)


@pytest.mark.parametrize(
    "pairs",
    [
        [(8, 3), (0, 0), (8, 1)],
        [(2, 0), (3, 1), (4, 2), (7, 3)],
        [(5, 3), (4, 2), (3, 1)],
        [(1, 0), (2, 2), (3, 3)],
        [(1, 1)],
        [],
    ],
)
def test_swapped_blocks_arrive_bit_for_bit(pairs):
    pool = random_pool()
    host = random_pool(num_blocks=4).cpu()
    expected = bits(host).clone()
    for source, target in pairs:
        expected[target] = bits(pool)[source]
    blocks.swap_blocks(pool, host, pairs)
    if IS_CUDA:
        torch.cuda.synchronize()
    assert torch.equal(bits(host), expected)
    back = random_pool()
    blocks.swap_blocks(host, back, [(target, source) for source, target in pairs[:1]])
    for source, target in pairs[:1]:
        assert torch.equal(bits(back)[source], bits(host)[target])


def test_adjacent_blocks_are_one_transfer(monkeypatch):
    """Blocks are copied together if they are adjacent in both pools."""
    copies = []
    copy = torch.Tensor.copy_

    def counting(tensor, source, non_blocking=False):
        copies.append(len(source))
        return copy(tensor, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    blocks.swap_blocks(
        random_pool(), random_pool(), [(2, 0), (3, 1), (4, 2), (6, 3), (7, 5), (8, 6)]
    )
    assert copies == [3, 1, 2]


def test_empty_lists_of_blocks_change_nothing():
    pool = random_pool()
    before = bits(pool).clone()
    blocks.copy_blocks(pool, [])
    blocks.gather_blocks(pool, [], torch.empty(0, 90, device=DEVICE))
    blocks.scatter_blocks(torch.empty(0, 90, device=DEVICE), pool, [])
    assert torch.equal(bits(pool), before)


def test_a_pool_that_is_not_contiguous_is_refused():
    pool = torch.zeros(4, 4, 4, device=DEVICE).transpose(0, 2)
    with pytest.raises(RuntimeError, match="view"):
        blocks.gather_blocks(pool, [0], torch.empty(1, 16, device=DEVICE))
