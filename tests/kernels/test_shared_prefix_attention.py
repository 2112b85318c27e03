"""Attention over sequences that share leading blocks equals that over each alone, bit for bit."""

import pytest
import torch

import kernels
from tests.support.paged_batches import step_metadata

BLOCK_SIZE = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 64


def _pool(num_blocks, dtype):
    generator = torch.Generator().manual_seed(0)
    shape = (num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(dtype)


def _attend(query, pool, contexts, tables, *, sinks=False, **rule):
    spans = [(context - 1, 1) for context in contexts]
    _, meta = step_metadata(spans, tables, BLOCK_SIZE)
    rule["sinks"] = torch.linspace(-3, 3, NUM_HEADS).to(query.dtype) if sinks else None
    return kernels.paged_attention(query, pool, meta, scale=0.125, **rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [{}, {"sliding_window": 150}, {"soft_cap": 1.0, "sinks": True}])
@pytest.mark.parametrize("num_shared", [0, 7, 8, 9, 16, 30])
def test_shared_blocks_change_no_bit(num_shared, rule, dtype):
    shared = list(range(1, 1 + num_shared))
    contexts, tables, free = [], [], 1 + num_shared
    for tail in (1, 5, 16, 17, 40, 130, 200, 3):
        num_own = -(-tail // BLOCK_SIZE)
        contexts.append(num_shared * BLOCK_SIZE + tail)
        tables.append([*shared, *range(free, free + num_own)])
        free += num_own
    # One more shares half of the prefix, and one shares nothing.
    contexts.append((num_shared + 3) * BLOCK_SIZE)
    tables.append(
        [*shared[: num_shared // 2], *range(free, free + num_shared - num_shared // 2 + 3)]
    )
    free += num_shared + 3
    contexts.append(300)
    tables.append(list(range(free, free + 19)))
    pool = _pool(free + 19, dtype)
    query = torch.randn(len(contexts), NUM_HEADS, HEAD_DIM).to(dtype)

    together = _attend(query, pool, contexts, tables, **rule)
    for row, (context, table) in enumerate(zip(contexts, tables, strict=True)):
        alone = _attend(query[row : row + 1], pool, [context], [table], **rule)
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=_bound(dtype))


def _bound(dtype):
    """Returns 0 for the native kernels; torch sums in an order that depends on the batch."""
    native = type(kernels.make_weight(1, 1, dtype, torch.device("cpu"), kernels.WeightUse.LINEAR))
    return 0 if native.__name__ == "PackedWeight" else 2e-2
