"""Attention over sequences that share blocks equals attention over each sequence alone."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kernels
from tests.support.kernel_checks import DTYPES, IS_NATIVE, normal, on_threads
from tests.support.paged_batches import step_metadata

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 6
# Torch sums in an order that depends on the batch.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


@st.composite
def shared_tables(draw):
    """Block size, (start, query length) of each sequence, and its blocks.

    Each sequence begins with some blocks of an earlier one, which may share them in turn.
    """
    block_size = draw(st.sampled_from([1, 3, 16, 32, 48, 128]))
    spans, tables, num_blocks = [], [], 1
    for index in range(draw(st.integers(1, 12))):
        context = draw(st.integers(1, 700) | st.integers(380, 700))
        length = min(context, draw(st.sampled_from([1, 1, 1, 1, 2, 30])))
        size = -(-context // block_size)
        parent = tables[draw(st.integers(0, index - 1))] if index else []
        # Near a whole number of tiles, for any tile size that is a power of two.
        num_shared = draw(st.sampled_from([0, 128, 256, 384, 512, 700])) // block_size
        shared = parent[: min(size, max(0, num_shared + draw(st.integers(-1, 1))))]
        own = range(num_blocks, num_blocks + size - len(shared))
        num_blocks += len(own)
        spans.append((context - length, length))
        tables.append([*shared, *own])
    return block_size, spans, tables, num_blocks


# The first sequence shares less with the second than with the third.
LESS_THEN_MORE = (
    128,
    [(639, 1)] * 3,
    [[1, 2, 3, 4, 5], [1, 6, 7, 8, 9], [1, 2, 3, 10, 11]],
    12,
)


@example(drawn=LESS_THEN_MORE, sliding_window=None, dtype=torch.float32, num_threads=1)
@settings(max_examples=60, deadline=None)
@given(
    drawn=shared_tables(),
    sliding_window=st.sampled_from([None, None, None, 1, 100, 300]),
    dtype=st.sampled_from(DTYPES),
    num_threads=st.sampled_from([1, 3]),
)
def test_sharing_blocks_does_not_change_attention(drawn, sliding_window, dtype, num_threads):
    block_size, spans, tables, num_blocks = drawn
    pool = normal(num_blocks, 2, NUM_KV_HEADS, block_size, HEAD_DIM, dtype=dtype)
    pool[0] = torch.nan
    lengths = [length for _, length in spans]
    query = normal(sum(lengths), NUM_HEADS, HEAD_DIM, dtype=dtype, seed=1)

    def attend(rows, chosen):
        _, meta = step_metadata([spans[i] for i in chosen], [tables[i] for i in chosen], block_size)
        return kernels.paged_attention(rows, pool, meta, scale=0.4, sliding_window=sliding_window)

    def attend_together():
        return attend(query, range(len(spans))).split(lengths)

    (together,) = on_threads([num_threads], attend_together)
    tolerance = 0 if IS_NATIVE else TOLERANCE[dtype]
    for index, (rows, result) in enumerate(zip(query.split(lengths), together, strict=True)):
        assert result.isfinite().all()
        torch.testing.assert_close(result, attend(rows, [index]), atol=tolerance, rtol=0)
