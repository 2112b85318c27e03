"""Builds steps over a paged cache: block tables in shuffled pools, and attention metadata."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.paged_kv import AttentionMetadata


def shuffled_tables(
    context_lens: Sequence[int], block_size: int, seed: int = 0
) -> tuple[list[list[int]], int]:
    """Returns block ids of each sequence, scattered over a pool, and the pool's number of blocks.

    No sequence gets block 0, which pads the tables, and some blocks stay unused.
    """
    sizes = [-(-context_len // block_size) for context_len in context_lens]
    num_blocks = sum(sizes) + 3
    free = list(range(1, num_blocks))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(size)] for size in sizes], num_blocks


def step_metadata(
    spans: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int
) -> tuple[torch.Tensor, AttentionMetadata]:
    """Returns positions `[num_tokens]` and metadata of a step.

    Args:
        spans: (start position, query length) of each sequence.
        tables: block ids of each sequence.
        block_size: tokens per block.
    """
    positions = [range(start, start + length) for start, length in spans]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, span in zip(tables, positions, strict=True)
        for position in span
    ]
    contexts = [start + length for start, length in spans]
    width = max(1, -(-max(contexts, default=0) // block_size))
    padded = [[*table[:width], *[0] * (width - len(table))] for table in tables]
    starts = [0]
    for _, length in spans:
        starts.append(starts[-1] + length)
    meta = AttentionMetadata(
        block_tables=torch.tensor(padded, dtype=torch.int32).view(len(spans), width),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        max_query_len=max((length for _, length in spans), default=0),
        max_context_len=max(contexts, default=0),
    )
    return torch.tensor([position for span in positions for position in span]), meta


def meta_on(device: torch.device, meta: AttentionMetadata) -> AttentionMetadata:
    """Returns the metadata with its tensors on `device`."""
    names = ("block_tables", "query_starts", "context_lens", "slot_mapping")
    return replace(meta, **{name: getattr(meta, name).to(device) for name in names})
