"""Copies of whole KV blocks, in Triton: one launch for any number of blocks."""

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.triton.launch import launch_table

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks", "swap_blocks"]


@TRITON.implements(reference.gather_blocks)
def gather_blocks(
    pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, out: torch.Tensor
) -> None:
    rows, ids = _block_words(pool), _as_index(block_ids, pool.device)
    if out.device == pool.device:
        _copy_rows(rows, ids, _block_words(out), None, len(ids))
        return
    staging = torch.empty((len(ids), rows.shape[1]), dtype=torch.int32, device=pool.device)
    _copy_rows(rows, ids, staging, None, len(ids))
    _block_words(out).copy_(staging)


@TRITON.implements(reference.scatter_blocks)
def scatter_blocks(
    source: torch.Tensor, pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor
) -> None:
    ids = _as_index(block_ids, pool.device)
    _copy_rows(_block_words(source).to(pool.device), None, _block_words(pool), ids, len(ids))


@TRITON.implements(reference.copy_blocks)
def copy_blocks(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    if not pairs:
        return
    rows = _block_words(pool)
    # [2, n]: one transfer for both.
    sources, targets = _as_index([*zip(*pairs, strict=True)], pool.device)
    source_ids, target_ids = (set(ids) for ids in zip(*pairs, strict=True))
    if source_ids.isdisjoint(target_ids):
        _copy_rows(rows, sources, rows, targets, len(pairs))
        return
    staging = torch.empty((len(pairs), rows.shape[1]), dtype=torch.int32, device=pool.device)
    _copy_rows(rows, sources, staging, None, len(pairs))
    _copy_rows(staging, None, rows, targets, len(pairs))


@TRITON.implements(reference.swap_blocks)
def swap_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copies runs of blocks that are adjacent in both pools in one transfer."""
    for source_id, target_id, count in _runs(pairs):
        target[target_id : target_id + count].copy_(
            source[source_id : source_id + count], non_blocking=True
        )


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yields (first source, first target, count) of runs of pairs adjacent in both pools."""
    first = 0
    for index in range(1, len(pairs) + 1):
        count = index - first
        source_id, target_id = pairs[first]
        if index == len(pairs) or pairs[index] != (source_id + count, target_id + count):
            yield source_id, target_id, count
            first = index


def _copy_rows(
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    num_rows: int,
) -> None:
    """`target[target_ids[i]] = source[source_ids[i]]`; without ids, row i itself.

    Args:
        source: `[n, row_words]` int32, each row dense.
        source_ids: `[num_rows]` integers.
        target: as `source`, of another number of rows; must not overlap what is read.
        target_ids: as `source_ids`, all different.
        num_rows: rows to copy.
    """
    row_words = source.shape[1]
    assert source.stride(1) == target.stride(1) == 1
    assert target.shape[1] == row_words
    launch = launch_table(source.device).block_copy.for_size(row_words)
    _copy_rows_kernel[(num_rows, triton.cdiv(row_words, launch.block_size))](
        source,
        source_ids,
        target,
        target_ids,
        source.stride(0),
        target.stride(0),
        row_words,
        BLOCK=launch.block_size,
        num_warps=launch.num_warps,
    )


# These addresses change from step to step, which must not cause another compilation.
@triton.jit(do_not_specialize_on_alignment=["source_ids", "target_ids"])
def _copy_rows_kernel(
    source,
    source_ids,
    target,
    target_ids,
    source_stride,
    target_stride,
    row_words,
    BLOCK: tl.constexpr,
):
    """`target[target_ids[i]] = source[source_ids[i]]`; program (i, j) copies block j of row i."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < row_words
    source_row, target_row = row, row
    if source_ids is not None:
        source_row = tl.load(source_ids + row).to(tl.int64)
    if target_ids is not None:
        target_row = tl.load(target_ids + row).to(tl.int64)
    words = tl.load(source + source_row * source_stride + columns, mask=mask)
    tl.store(target + target_row * target_stride + columns, words, mask=mask)


def _block_words(tensor: torch.Tensor) -> torch.Tensor:
    """Views blocks as `[num_blocks, block_words]` int32, without a copy."""
    block_elements = math.prod(tensor.shape[1:])  # torch cannot infer it if there are no blocks
    return tensor.view(len(tensor), block_elements).view(torch.int32)


def _as_index(block_ids: Sequence[object] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns ids on `device` without waiting for it: the transfer is queued in its stream."""
    if isinstance(block_ids, torch.Tensor):
        return block_ids.to(device, non_blocking=True)
    ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=device.type == "cuda")
    return ids.to(device, non_blocking=True)
