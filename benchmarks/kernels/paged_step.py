"""A step's KV cache to measure on: pools of a model's layers, blocks scattered, and metadata."""

import random
from collections.abc import Sequence

import torch

from benchmarks.kernels.case import Numbers
from benchmarks.kernels.cost import Span
from benchmarks.kernels.shapes import DecoderShape
from kernels import AttentionMetadata

__all__ = ["BLOCK_SIZE", "kv_layers", "step_metadata"]

BLOCK_SIZE = 16
"""The engine's default."""


def kv_layers(
    shape: DecoderShape, numbers: Numbers, num_blocks: int, num_copies: int
) -> list[torch.Tensor]:
    """As many layers of equal KV, `[num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim]`.

    As in the engine, a block of a pool holds all layers of the model; there are as many pools
    as it takes.
    """
    block = (2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    layer = numbers.normal(num_blocks, *block, seed=3)
    num_layers = min(num_copies, shape.num_layers)
    pools = [
        layer.unsqueeze(1).repeat(1, num_layers, 1, 1, 1, 1)
        for _ in range(-(-num_copies // num_layers))
    ]
    layers = [pool[:, index] for pool in pools for index in range(num_layers)]
    return layers[:num_copies]


def step_metadata(spans: Sequence[Span]) -> tuple[AttentionMetadata, int]:
    """The metadata of a step whose sequences' blocks are scattered; how many blocks there are."""
    sizes = [-(-span.context // BLOCK_SIZE) for span in spans]
    block_ids = random.Random(0).sample(range(sum(sizes)), sum(sizes))
    tables = torch.zeros((len(spans), max(sizes)), dtype=torch.int32)
    starts, slots = [0], []
    for table, span, size in zip(tables, spans, sizes, strict=True):
        own = torch.tensor([block_ids.pop() for _ in range(size)])
        table[:size] = own
        positions = torch.arange(span.num_cached, span.context)
        slots.append(own[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        starts.append(starts[-1] + span.num_queries)
    contexts = [span.context for span in spans]
    meta = AttentionMetadata(
        block_tables=tables,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        slot_mapping=torch.cat(slots),
        max_query_len=max(span.num_queries for span in spans),
        max_context_len=max(contexts),
    )
    return meta, sum(sizes)
