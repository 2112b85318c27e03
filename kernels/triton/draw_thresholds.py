"""What top-k and top-p leave of a row of logits, found without sorting it.

Both keep the values from some threshold up, ties with the last one included. Written as
*smallest t for which what lies above t weighs less than a limit*, the threshold is

- of top-k: the k-th largest value, where every value weighs 1 and the limit is k. Above the
  k-th largest lie fewer than k values; above anything smaller, at least k;
- of top-p: the reference's, where a value weighs `round(exp(scaled) * 2**32)`, or 0 below
  top-k's threshold, and the limit is `top_p` of the sum of all weights. The reference sorts
  v1 >= v2 >= ... and takes the last vj ahead of which lies less than the limit. At the first
  of vj's equals no more lies ahead, and that is the weight above vj: so the threshold meets
  the condition. A smaller value that met it would stand first among its equals with less than
  the limit ahead, after j, against j being the last.

Only values in the row change what lies above, so t is one of them. It is searched among the
2**32 ordered bit patterns of a float32, whose order is that of the values, a sixteenth of what
is left each time. Values that `scaled` cannot tell apart make no difference: weights above
are as well below the limit at the greatest of them as at the others, and all of them scale to
the same threshold.

Sums are of whole numbers, below 2**53 in all: exact in any order.
"""

import torch
import triton
import triton.language as tl

from kernels.draws import DrawTable
from kernels.triton.launch import launch_table

__all__ = ["find_thresholds", "scale_logits"]

_WEIGHT_SCALE = tl.constexpr(2.0**32)
_ROUNDS_TO_WHOLE = tl.constexpr(2.0**52)  # the float64 numbers from here on are whole
_BELOW_ALL_KEYS = tl.constexpr(-(2**31))  # the key of a NaN, which no row that is drawn from holds


def find_thresholds(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    likeliest: torch.Tensor,
    draws: DrawTable,
    draw_ids: torch.Tensor,
    logit_rows: torch.Tensor | None,
) -> torch.Tensor:
    """The lowest scaled logit that each draw keeps: `[n]` float64.

    Anything where a draw is greedy or its likeliest token invalid. Arguments are as those of
    `reference.draw_tokens`.
    """
    vocab_size = logits.shape[-1]
    thresholds = torch.empty(len(draw_ids), dtype=torch.float64, device=logits.device)
    launch = launch_table(logits.device).draw_thresholds.for_size(vocab_size)
    _thresholds_kernel[(len(draw_ids),)](
        logits,
        maxima,
        likeliest,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draw_ids,
        logit_rows,
        thresholds,
        logits.stride(0),
        vocab_size,
        BLOCK=launch.block_size,
        num_warps=launch.num_warps,
    )
    return thresholds


# Where these begin changes from step to step, which must not have the kernel compiled again.
@triton.jit(
    do_not_specialize_on_alignment=[
        "maxima",
        "likeliest",
        "temperatures",
        "top_ks",
        "top_ps",
        "draw_ids",
        "logit_rows",
    ]
)
def _thresholds_kernel(
    logits,
    maxima,
    likeliest,
    temperatures,
    top_ks,
    top_ps,
    draw_ids,
    logit_rows,
    thresholds,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """`thresholds[i]`: the lowest scaled logit that top-k, then top-p keep; -inf keeps all.

    Program i finds that of draw i, in eight passes over its row for each of the two that
    filters. Greedy and invalid draws have none.
    """
    draw = tl.program_id(0).to(tl.int64)
    row = draw if logit_rows is None else tl.load(logit_rows + draw)
    draw_id = tl.load(draw_ids + draw)
    temperature = tl.load(temperatures + draw_id)
    if (temperature <= 0.0) | (tl.load(likeliest + row) < 0):
        return
    top_k = tl.load(top_ks + draw_id)
    top_p = tl.load(top_ps + draw_id)
    maximum = tl.load(maxima + row)
    row_logits = logits + row * row_stride
    threshold = tl.full((), float("-inf"), tl.float64)
    if (top_k > 0) & (top_k < vocab_size):
        kth = _least_to_outweigh(
            row_logits,
            maximum,
            temperature,
            threshold,
            top_k.to(tl.int32),
            vocab_size,
            False,
            BLOCK,
        )
        threshold = scale_logits(kth, maximum, temperature)
    if top_p < 1.0:
        last = _least_to_outweigh(
            row_logits, maximum, temperature, threshold, top_p, vocab_size, True, BLOCK
        )
        threshold = scale_logits(last, maximum, temperature)
    tl.store(thresholds + draw, threshold)


@triton.jit
def scale_logits(logits, maximum, temperature):
    """`(logits - maximum) / temperature` in float64, at most 0: no temperature overflows it."""
    return (logits.to(tl.float64) - maximum.to(tl.float64)) / temperature


@triton.jit
def _least_to_outweigh(
    row_logits,
    maximum,
    temperature,
    threshold,
    limit,
    vocab_size,
    IS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest value above which less than the limit lies: of top-p a share of the whole.

    Searched between `low`, above which the limit lies at least, and `high`, above which less.
    """
    high = _ordered(maximum.to(tl.int32, bitcast=True)).to(tl.int64)
    low = tl.full((), _BELOW_ALL_KEYS, tl.int64)
    total = tl.full((), 0, tl.float64)
    while high - low > 1:
        step = (high - low + 15) // 16
        pivots = (low + step * tl.arange(0, 16)).to(tl.int32)
        above = _weights_above(
            pivots, row_logits, maximum, temperature, threshold, vocab_size, IS_TOP_P, BLOCK
        )
        if IS_TOP_P:
            total = tl.maximum(total, tl.max(above))  # above the first pivot of all lies all
            outweighs = above >= limit * total
        else:
            outweighs = above >= limit
        # At least one does, the first; with a share of 0, which rounding may give, all.
        low += step * (tl.sum(outweighs.to(tl.int64)) - 1)
        high = tl.minimum(high, low + step)
    return _ordered(high.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _weights_above(
    pivots,
    row_logits,
    maximum,
    temperature,
    threshold,
    vocab_size,
    IS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the values above each of 16 keys weigh: `[16]` float64, or int32 counts for top-k.

    Tokens are the last axis, which is spread over threads: each weight is computed once, and a
    thread compares it to all pivots.
    """
    sums = tl.zeros([16, BLOCK], tl.float64 if IS_TOP_P else tl.int32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        mask = tokens < vocab_size
        values = tl.load(row_logits + tokens, mask=mask, other=float("-inf"))
        keys = tl.where(mask, _ordered(values.to(tl.int32, bitcast=True)), _BELOW_ALL_KEYS)
        is_above = keys[None, :] > pivots[:, None]
        if IS_TOP_P:
            scaled = scale_logits(values, maximum, temperature)
            weights = tl.exp(scaled) * _WEIGHT_SCALE + _ROUNDS_TO_WHOLE - _ROUNDS_TO_WHOLE
            weights = tl.where(scaled >= threshold, weights, 0.0)
            sums += tl.where(is_above, weights[None, :], 0.0)
        else:
            sums += is_above.to(tl.int32)
    return tl.sum(sums, axis=1)


@triton.jit
def _ordered(bits):
    """From a float32's bits to an int32 that orders as the floats do, and back.

    The bits of a negative number grow as it falls; so all but the sign are turned over.
    """
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
