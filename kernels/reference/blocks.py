"""Copies of whole KV blocks, in plain torch."""

from collections.abc import Sequence

import torch

from kernels.dispatch import kernel

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks", "swap_blocks"]


@kernel("pool.device")
def gather_blocks(
    pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, out: torch.Tensor
) -> None:
    """Copies blocks out of the pool: `out[i] = pool[block_ids[i]]`.

    Args:
        pool: `[num_blocks, ...]`, contiguous.
        block_ids: `[n]`.
        out: `[n, block_elements]` of the pool's dtype or `[n, block_bytes]`
            uint8, on any device; each row is contiguous and begins at a multiple
            of 4 bytes, and rows may have any distance.
    """
    rows, ids = _block_words(pool), _as_index(block_ids, pool)
    target = _block_words(out)
    if out.device == pool.device:
        torch.index_select(rows, 0, ids, out=target)
    else:
        target.copy_(rows.index_select(0, ids))


@kernel("pool.device")
def scatter_blocks(
    source: torch.Tensor, pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor
) -> None:
    """Copies blocks into the pool: `pool[block_ids[i]] = source[i]`.

    Args:
        source: shaped and typed as `out` of `gather_blocks`.
        pool: `[num_blocks, ...]`, contiguous.
        block_ids: `[n]`, all different.
    """
    ids = _as_index(block_ids, pool)
    _block_words(pool).index_copy_(0, ids, _block_words(source).to(pool.device))


@kernel("pool.device")
def copy_blocks(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks within the pool, all sources read before any target is written.

    Args:
        pool: `[num_blocks, ...]`, contiguous.
        pairs: (source, target) block ids; targets all different.
    """
    if not pairs:
        return
    rows = _block_words(pool)
    sources, targets = zip(*pairs, strict=True)
    rows.index_copy_(0, _as_index(targets, pool), rows.index_select(0, _as_index(sources, pool)))


@kernel("(target if source.is_cpu else source).device")
def swap_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copies blocks from one pool to another, on any two devices: `target[t] = source[s]`.

    Each block, or run of blocks, is one transfer. Transfers between a GPU and pinned memory are
    asynchronous: later work of the device's stream sees the copies, the host only after
    synchronizing.

    Args:
        source: `[num_blocks, ...]`, contiguous.
        target: as `source`, of another number of blocks.
        pairs: (block id in `source`, block id in `target`), the latter all different.
    """
    for source_id, target_id in pairs:
        target[target_id].copy_(source[source_id], non_blocking=True)


def _block_words(tensor: torch.Tensor) -> torch.Tensor:
    """Views blocks as `[num_blocks, block_words]` int32, without a copy.

    Copying words makes narrow dtypes as fast as wide ones. A block of K and V is always a whole
    number of words.
    """
    return tensor.view(len(tensor), -1).view(torch.int32)


def _as_index(block_ids: Sequence[int] | torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(block_ids, dtype=torch.int64, device=pool.device)
