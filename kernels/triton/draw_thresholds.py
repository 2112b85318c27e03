"""Finds the thresholds of top-k, top-p and min-p in rows of logits without sorting.

Each keeps the values from some threshold up. That of min-p is given; the others keep ties with the
last value that they keep. Their threshold is the *smallest t for which the values above t weigh
less than a limit*:

- for top-k it is the k-th largest value, where every value weighs 1 and the limit is k. Above the
  k-th largest lie fewer than k values; above anything smaller, at least k;
- for top-p it is the reference's, where a value weighs `round(exp(scaled) * 2**32)`, or 0 below
  top-k's threshold, and the limit is `top_p` of the sum of all weights. The reference sorts
  v1 >= v2 >= ... and takes the last vj ahead of which lies less than the limit. At the first
  of vj's equals no more lies ahead, and that is the weight above vj: so the threshold meets
  the condition. A smaller value that met it would stand first among its equals with less than
  the limit ahead, after j, against j being the last.

Only values in the row change the weight above a value, so t is one of them. It is searched among
the 2**32 ordered bit patterns of a float32, whose order is that of the values; each pass narrows
the range to a sixteenth. Values with the same `scaled` make no difference: the weight above is
below the limit at the greatest of them as at the others, and all of them scale to the same
threshold.

Each pass is a launch in which several programs share a row and add up their sums. These are
whole numbers below 2**53, so they are exact in any order. A program reads only the results of
earlier launches, and narrows the range itself. One program per row would need one launch, but about
1 ms for top-p over 128k tokens (an estimate, as all here), and as much for 1 row as for 100; these
take some 5 us each for few rows. Steps that filter nothing pay for it, since a recorded
step cannot omit launches: 18 that return at once, at about 1.5 us each in a CUDA graph. A
search in sixty-fourths would save 4 of them, 6 us of a step of some ms, but compare each value
6 * 64 times in place of 8 * 16, which for large batches is most of the work.
"""

import torch
import triton
import triton.language as tl

from kernels.row_state import DrawTable
from kernels.triton.launch import launch_table

__all__ = ["find_thresholds", "scale_logits"]

_PASSES = tl.constexpr(8)  # of 4 of the key's 32 bits
_TILES = 8  # blocks of a program, each of the size in the launch table
_WEIGHT_SCALE = tl.constexpr(2.0**32)
_ROUNDS_TO_WHOLE = tl.constexpr(2.0**52)  # the float64 numbers from here on are whole
_BELOW_ALL_KEYS = tl.constexpr(-(2**31))  # the key of a NaN, which rows to draw from never hold


def find_thresholds(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    likeliest: torch.Tensor,
    draws: DrawTable,
    draw_ids: torch.Tensor,
    logit_rows: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the lowest scaled logit that each draw keeps: `[n]` float64; -inf keeps all.

    Values of greedy draws and of draws whose likeliest token is invalid are undefined. Arguments
    are as in `reference.draw_tokens`.
    """
    count, vocab_size, device = len(draw_ids), logits.shape[-1], logits.device
    launch = launch_table(device).draw_thresholds.for_size(vocab_size)
    num_splits = triton.cdiv(vocab_size, launch.block_size * _TILES)
    thresholds = torch.empty(count, dtype=torch.float64, device=device)
    shape = (2, _PASSES.value, count)  # of both searches
    bounds = torch.empty((*shape, 2), dtype=torch.int64, device=device)
    sums = torch.zeros((*shape, 16), dtype=torch.float64, device=device)
    for search, limits in enumerate((draws.top_k, draws.top_p)):
        vectors = (maxima, likeliest, draws.temperature, limits, draw_ids, logit_rows)
        scratch = (thresholds, bounds[search], sums[search], vocab_size, count)
        for place in range(_PASSES.value):
            _search_kernel[(count, num_splits)](
                *vectors,
                *scratch,
                logits,
                logits.stride(0),
                place,
                IS_TOP_P=search == 1,
                BLOCK=launch.block_size,
                TILES=_TILES,
                num_warps=launch.num_warps,
            )
        _settle_kernel[(count,)](
            *vectors, *scratch, draws.log_min_p, IS_TOP_P=search == 1, num_warps=1
        )
    return thresholds


# These addresses change from step to step, which must not cause another compilation.
_VECTORS = ["maxima", "likeliest", "temperatures", "limits", "draw_ids", "logit_rows"]


@triton.jit(do_not_specialize=["count", "place"], do_not_specialize_on_alignment=_VECTORS)
def _search_kernel(
    maxima,
    likeliest,
    temperatures,
    limits,
    draw_ids,
    logit_rows,
    thresholds,
    bounds,
    sums,
    vocab_size,
    count,
    logits,
    row_stride,
    place,
    IS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """`sums[place, i]`: what lies above each of the range's sixteenths in draw i's row.

    The range is `bounds[place, i]`, which follows from the pass before. Program (i, j) adds TILES
    tiles of BLOCK tokens, unless draw i does not filter or one key is left.
    """
    draw, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = draw if logit_rows is None else tl.load(logit_rows + draw)
    draw_id = tl.load(draw_ids + draw)
    temperature, limit = tl.load(temperatures + draw_id), tl.load(limits + draw_id).to(tl.float64)
    is_drawn = (temperature > 0.0) & (tl.load(likeliest + row) >= 0)
    if (is_drawn & _filters(limit, vocab_size, IS_TOP_P)) == 0:
        return
    maximum = tl.load(maxima + row)
    low = tl.full((), _BELOW_ALL_KEYS, tl.int64)
    high = _ordered(maximum.to(tl.int32, bitcast=True)).to(tl.int64)
    if place > 0:
        low, high = _narrow(bounds, sums, draw, count, place - 1, limit, IS_TOP_P)
    slot = place * count + draw
    if split == 0:
        tl.store(bounds + slot * 2, low)
        tl.store(bounds + slot * 2 + 1, high)
    if high - low > 1:
        pivots = (low + _step(low, high) * tl.arange(0, 16)).to(tl.int32)
        first = split * (TILES * BLOCK)
        above = _weights_above(
            pivots,
            logits + row * row_stride,
            first,
            tl.minimum(first + TILES * BLOCK, vocab_size),
            maximum,
            temperature,
            tl.load(thresholds + draw),
            IS_TOP_P,
            BLOCK,
        )
        # The launch's end orders these before the next pass reads them.
        tl.atomic_add(sums + slot * 16 + tl.arange(0, 16), above.to(tl.float64), sem="relaxed")


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=[*_VECTORS, "log_min_ps"])
def _settle_kernel(
    maxima,
    likeliest,
    temperatures,
    limits,
    draw_ids,
    logit_rows,
    thresholds,
    bounds,
    sums,
    vocab_size,
    count,
    log_min_ps,
    IS_TOP_P: tl.constexpr,
):
    """`thresholds[i]`: what draw i's search found, scaled; of top-k, which comes first, -inf
    where it does not filter; of top-p, which comes last, no less than min-p's. Program i: draw i.
    """
    draw = tl.program_id(0).to(tl.int64)
    row = draw if logit_rows is None else tl.load(logit_rows + draw)
    draw_id = tl.load(draw_ids + draw)
    temperature, limit = tl.load(temperatures + draw_id), tl.load(limits + draw_id).to(tl.float64)
    if (temperature <= 0.0) | (tl.load(likeliest + row) < 0):
        return
    threshold = tl.full((), float("-inf"), tl.float64)
    if IS_TOP_P:
        threshold = tl.load(thresholds + draw)
    if _filters(limit, vocab_size, IS_TOP_P):
        _, high = _narrow(bounds, sums, draw, count, _PASSES - 1, limit, IS_TOP_P)
        value = _ordered(high.to(tl.int32)).to(tl.float32, bitcast=True)
        threshold = scale_logits(value, tl.load(maxima + row), temperature)
    if IS_TOP_P:
        threshold = tl.maximum(threshold, tl.load(log_min_ps + draw_id))
    tl.store(thresholds + draw, threshold)


@triton.jit
def _filters(limit, vocab_size, IS_TOP_P: tl.constexpr):
    """Returns whether a limit may exclude tokens."""
    return limit < 1.0 if IS_TOP_P else (limit > 0) & (limit < vocab_size)


@triton.jit
def scale_logits(logits, maximum, temperature):
    """Computes `(logits - maximum) / temperature` in float64; at most 0, so it never overflows."""
    return (logits.to(tl.float64) - maximum.to(tl.float64)) / temperature


@triton.jit
def _narrow(bounds, sums, draw, count, place, limit, IS_TOP_P: tl.constexpr):
    """Returns the range after pass `place`: the weight above `low` is at least the limit, that
    above `high` is less.

    For top-p the limit is a share of the total weight, which lies above the very first pivot.
    """
    slot = place * count + draw
    low, high = tl.load(bounds + slot * 2), tl.load(bounds + slot * 2 + 1)
    above = tl.load(sums + slot * 16 + tl.arange(0, 16))
    outweighs = above >= (limit * tl.load(sums + draw * 16) if IS_TOP_P else limit)
    # At least the first does; all do if the share is 0, which rounding may produce.
    step = _step(low, high)
    narrowed = low + step * (tl.sum(outweighs.to(tl.int64)) - 1)
    is_found = high - low <= 1  # then nothing was added up
    low = tl.where(is_found, low, narrowed)
    return low, tl.where(is_found, high, tl.minimum(high, low + step))


@triton.jit
def _step(low, high):
    """Returns a sixteenth of the range, rounded up."""
    return (high - low + 15) // 16


@triton.jit
def _weights_above(
    pivots,
    row_logits,
    first,
    end,
    maximum,
    temperature,
    threshold,
    IS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums the weights of tokens `first` to `end` whose values lie above each of 16 keys.

    Returns `[16]` float64, or int32 counts for top-k, which ignores `threshold`.

    Tokens are the last axis, which is spread over threads: each weight is computed once, and a
    thread compares it to all pivots.
    """
    sums = tl.zeros([16, BLOCK], tl.float64 if IS_TOP_P else tl.int32)
    for start in range(first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        mask = tokens < end
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
    """Converts a float32's bits to an int32 with the order of the floats, and back.

    The bits of negative numbers are in reverse order, so all of them but the sign are inverted.
    """
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
