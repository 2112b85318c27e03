"""Cases of copying blocks, scattered over a pool, to a buffer and from it."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.kernels.attention import BLOCK_SIZE
from benchmarks.kernels.case import Call, Case, DecoderShape, Numbers, Result, Sizes
from benchmarks.kernels.cost import Cost

__all__ = ["gather_cases", "scatter_cases"]

_NUM_BLOCKS = 64


def gather_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Blocks of a pool into a buffer: each byte is read and written."""
    yield _case("gather_blocks", shape, dtype)


def scatter_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Blocks of a buffer into a pool."""
    yield _case("scatter_blocks", shape, dtype)


def _case(name: str, shape: DecoderShape, dtype: torch.dtype) -> Case:
    num_words = 2 * shape.num_layers * shape.num_kv_features * BLOCK_SIZE
    return Case(
        name,
        f"blocks of {num_words * dtype.itemsize >> 10} KiB",
        f"{_NUM_BLOCKS} blocks",
        Cost(2 * _NUM_BLOCKS * num_words * dtype.itemsize),
        1,
        partial(_calls, name, num_words),
        is_recordable=False,
    )


def _calls(name: str, num_words: int, numbers: Numbers, num_copies: int) -> Sequence[Call]:
    """Returns calls that share a pool, of which each moves other blocks."""
    pool = numbers.normal(num_copies * _NUM_BLOCKS, num_words, seed=1)
    buffer = numbers.normal(_NUM_BLOCKS, num_words, seed=2)
    ids = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0)).to(numbers.device)
    move = partial(_gather if name == "gather_blocks" else _scatter, numbers, pool, buffer)
    return [partial(move, part) for part in torch.split(ids, _NUM_BLOCKS)]


def _gather(
    numbers: Numbers, pool: torch.Tensor, buffer: torch.Tensor, ids: torch.Tensor
) -> Result:
    numbers.module.gather_blocks(pool, ids, buffer)
    return buffer


def _scatter(
    numbers: Numbers, pool: torch.Tensor, buffer: torch.Tensor, ids: torch.Tensor
) -> Result:
    numbers.module.scatter_blocks(buffer, pool, ids)
    return pool
