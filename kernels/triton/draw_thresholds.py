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
the 2**32 ordered bit patterns of a float32, whose order is that of the values. Values with the same
`scaled` make no difference: the weight above is below the limit at the greatest of them as at the
others, and all of them scale to the same threshold.

A pass over the row narrows the range to a sixteenth. The first two passes divide the values evenly:
those that can weigh something for top-p, and those up to 32 below the maximum for top-k. What then
lies in the range is gathered, a few hundred values of 128k in a model's logits, and one program
searches these to the end. Where they are too many, as are equal logits, it searches the whole row.

Each pass is a launch in which several programs share a row and add up their sums. These are
whole numbers below 2**53, so they are exact in any order. A program reads only the results of
earlier launches, and narrows the range itself. Rows that filter nothing, beside others that do, pay
for it: 8 launches that return at once.
"""

import torch
import triton
import triton.language as tl

from kernels.row_state import DrawTable
from kernels.triton.launch import launch_table

__all__ = ["find_thresholds", "scale_logits"]

_LINEAR_PASSES = tl.constexpr(2)  # that divide values evenly; others divide keys
_TOP_P_REACH = tl.constexpr(23.0)  # exp(-23) * 2**32 is less than half: it weighs nothing
_TOP_K_REACH = tl.constexpr(32.0)
_CAPACITY = 8192  # values of a draw that are gathered at most
_LOWEST = tl.constexpr(-3.4e38)
_KEY_OF_MINUS_INFINITY = tl.constexpr(-0x7F800001)
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
    grid = (count, triton.cdiv(vocab_size, launch.block_size * _TILES))
    thresholds = torch.empty(count, dtype=torch.float64, device=device)
    gathered = torch.empty((count, _CAPACITY), dtype=torch.float32, device=device)
    # Of both searches, of each pass; behind them the number of gathered values.
    sums = torch.zeros((2, launch.num_passes + 1, count, 16), dtype=torch.float64, device=device)
    options = {"BLOCK": launch.block_size, "num_warps": launch.num_warps}
    for search, limits in enumerate((draws.top_k, draws.top_p)):
        vectors = (maxima, likeliest, draws.temperature, limits, draw_ids, logit_rows)
        of_search = {"IS_TOP_P": search == 1, **options}
        scratch = (thresholds, sums[search], vocab_size, count, logits, logits.stride(0))
        for place in range(launch.num_passes):
            _search_kernel[grid](*vectors, *scratch, place, TILES=_TILES, **of_search)
        rest = (*vectors, *scratch, launch.num_passes, gathered)
        _gather_kernel[grid](*rest, TILES=_TILES, CAPACITY=_CAPACITY, **of_search)
        _settle_kernel[(count,)](*rest, draws.log_min_p, CAPACITY=_CAPACITY, **of_search)
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

    The range follows from the passes before. Program (i, j) adds TILES tiles of BLOCK tokens,
    unless draw i does not filter or one key is left.
    """
    draw, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, temperature, limit, is_drawn = _draw(
        draw, draw_ids, logit_rows, temperatures, limits, likeliest
    )
    if (is_drawn & _filters(limit, vocab_size, IS_TOP_P)) == 0:
        return
    maximum = tl.load(maxima + row)
    low, high, _, _ = _range_after(place, sums, draw, count, maximum, temperature, limit, IS_TOP_P)
    if high - low > 1:
        pivots = _pivots(low, high, place, temperature, IS_TOP_P).to(tl.int32)
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
        slots = (place * count + draw) * 16 + tl.arange(0, 16)
        tl.atomic_add(sums + slots, above.to(tl.float64), sem="relaxed")


@triton.jit(do_not_specialize=["count", "num_passes"], do_not_specialize_on_alignment=_VECTORS)
def _gather_kernel(
    maxima,
    likeliest,
    temperatures,
    limits,
    draw_ids,
    logit_rows,
    thresholds,
    sums,
    vocab_size,
    count,
    logits,
    row_stride,
    num_passes,
    gathered,
    IS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """`gathered[i]`: the values of draw i's row in the range, in any order; their number is
    `sums[num_passes, i, 0]`, and those beyond CAPACITY are not written. Program (i, j) looks at
    TILES tiles of BLOCK tokens.
    """
    draw, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, temperature, limit, is_drawn = _draw(
        draw, draw_ids, logit_rows, temperatures, limits, likeliest
    )
    if (is_drawn & _filters(limit, vocab_size, IS_TOP_P)) == 0:
        return
    maximum = tl.load(maxima + row)
    low, high, _, _ = _range_after(
        num_passes, sums, draw, count, maximum, temperature, limit, IS_TOP_P
    )
    if high - low > 1:
        number = sums + (num_passes * count + draw) * 16
        first = split * (TILES * BLOCK)
        for start in range(first, tl.minimum(first + TILES * BLOCK, vocab_size), BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            mask = tokens < vocab_size
            values = tl.load(logits + row * row_stride + tokens, mask=mask, other=float("-inf"))
            keys = _ordered(values.to(tl.int32, bitcast=True)).to(tl.int64)
            is_inside = mask & (keys > low) & (keys <= high)
            ranks = tl.cumsum(is_inside.to(tl.int32), 0)
            num_inside = tl.max(ranks, 0)
            if num_inside > 0:
                before = tl.atomic_add(number, num_inside.to(tl.float64), sem="relaxed")
                places = before.to(tl.int64) + ranks - 1
                is_kept = is_inside & (places < CAPACITY)
                tl.store(gathered + draw * CAPACITY + places, values, mask=is_kept)


@triton.jit(
    do_not_specialize=["count", "num_passes"],
    do_not_specialize_on_alignment=[*_VECTORS, "log_min_ps"],
)
def _settle_kernel(
    maxima,
    likeliest,
    temperatures,
    limits,
    draw_ids,
    logit_rows,
    thresholds,
    sums,
    vocab_size,
    count,
    logits,
    row_stride,
    num_passes,
    gathered,
    log_min_ps,
    IS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """`thresholds[i]`: what draw i's search finds, scaled; of top-k, which comes first, -inf
    where it does not filter; of top-p, which comes last, no less than min-p's. Program i: draw i.
    """
    draw = tl.program_id(0).to(tl.int64)
    row, temperature, limit, is_drawn = _draw(
        draw, draw_ids, logit_rows, temperatures, limits, likeliest
    )
    if is_drawn == 0:
        return
    threshold = tl.full((), float("-inf"), tl.float64)
    if IS_TOP_P:
        threshold = tl.load(thresholds + draw)
    if _filters(limit, vocab_size, IS_TOP_P):
        maximum = tl.load(maxima + row)
        low, high, heavier, least = _range_after(
            num_passes, sums, draw, count, maximum, temperature, limit, IS_TOP_P
        )
        number = tl.load(sums + (num_passes * count + draw) * 16)
        is_gathered = number <= CAPACITY
        while high - low > 1:
            step = _step(low, high)
            pivots = (low + step * tl.arange(0, 16)).to(tl.int32)
            if is_gathered:
                above = heavier + _weights_above(
                    pivots, gathered + draw * CAPACITY, 0, number.to(tl.int32),
                    maximum, temperature, threshold, IS_TOP_P, BLOCK,
                ).to(tl.float64)  # fmt: skip
            else:
                above = _weights_above(
                    pivots, logits + row * row_stride, 0, vocab_size,
                    maximum, temperature, threshold, IS_TOP_P, BLOCK,
                ).to(tl.float64)  # fmt: skip
            low += step * (tl.sum((above >= least).to(tl.int64), 0) - 1)
            high = tl.minimum(high, low + step)
        value = _ordered(high.to(tl.int32)).to(tl.float32, bitcast=True)
        threshold = scale_logits(value, maximum, temperature)
    if IS_TOP_P:
        threshold = tl.maximum(threshold, tl.load(log_min_ps + tl.load(draw_ids + draw)))
    tl.store(thresholds + draw, threshold)


@triton.jit
def _draw(draw, draw_ids, logit_rows, temperatures, limits, likeliest):
    """Returns a draw's row of logits, its temperature and limit, and whether it is random."""
    row = draw if logit_rows is None else tl.load(logit_rows + draw)
    draw_id = tl.load(draw_ids + draw)
    temperature, limit = tl.load(temperatures + draw_id), tl.load(limits + draw_id).to(tl.float64)
    is_drawn = (temperature > 0.0) & (tl.load(likeliest + row) >= 0)
    return row, temperature, limit, is_drawn


@triton.jit
def _filters(limit, vocab_size, IS_TOP_P: tl.constexpr):
    """Returns whether a limit may exclude tokens."""
    return limit < 1.0 if IS_TOP_P else (limit > 0) & (limit < vocab_size)


@triton.jit
def scale_logits(logits, maximum, temperature):
    """Computes `(logits - maximum) / temperature` in float64; at most 0, so it never overflows."""
    return (logits.to(tl.float64) - maximum.to(tl.float64)) / temperature


@triton.jit
def _range_after(
    num_passes, sums, draw, count, maximum, temperature, limit, IS_TOP_P: tl.constexpr
):
    """Returns the range that some passes leave, what lies above it, and the limit.

    What lies above `low` is at least the limit, and above `high` less. For top-p the limit is a
    share of the whole weight, which lies above the first pass's first pivot.
    """
    low = tl.full((), _BELOW_ALL_KEYS, tl.int64)
    high = _ordered(maximum.to(tl.int32, bitcast=True)).to(tl.int64)
    heavier = tl.full((), 0.0, tl.float64)
    least = limit
    if IS_TOP_P:
        least = limit * tl.load(sums + draw * 16)
    places = tl.arange(0, 16)
    for place in range(num_passes):
        if high - low > 1:  # else nothing was added up
            pivots = _pivots(low, high, place, temperature, IS_TOP_P)
            above = tl.load(sums + (place * count + draw) * 16 + places)
            # At least the first is; all are if the share is 0, which rounding may produce.
            num_heavy = tl.sum((above >= least).to(tl.int32), 0)
            is_next = places == num_heavy
            low = tl.sum(tl.where(places == num_heavy - 1, pivots, 0), 0)
            is_narrower = num_heavy < 16
            high = tl.where(is_narrower, tl.sum(tl.where(is_next, pivots, 0), 0), high)
            heavier = tl.where(is_narrower, tl.sum(tl.where(is_next, above, 0.0), 0), heavier)
    return low, high, heavier, least


@triton.jit
def _pivots(low, high, place, temperature, IS_TOP_P: tl.constexpr):
    """Returns the keys at which pass `place` divides the range, `[16]` int64; the first is `low`.

    The first pass divides the values that matter most, and leaves all below to its first part.
    """
    sixteenths = tl.arange(0, 16)
    top = _value_of(high)
    reach = temperature.to(tl.float64) * _TOP_P_REACH if IS_TOP_P else _TOP_K_REACH
    is_bounded = low > _KEY_OF_MINUS_INFINITY
    bottom = tl.where(is_bounded, _value_of(tl.where(is_bounded, low, high)), top - reach * 16 / 15)
    values = bottom + (top - bottom) * (sixteenths.to(tl.float64) / 16)
    values = tl.maximum(values, _LOWEST).to(tl.float32)
    pivots = _ordered(values.to(tl.int32, bitcast=True)).to(tl.int64)
    divides_values = (place == 0) | (is_bounded & (place < _LINEAR_PASSES))
    pivots = tl.where(divides_values, pivots, low + _step(low, high) * sixteenths)
    return tl.where(sixteenths == 0, low, tl.minimum(pivots, high))


@triton.jit
def _value_of(key):
    """Returns the number with an ordered key, in float64."""
    return _ordered(key.to(tl.int32)).to(tl.float32, bitcast=True).to(tl.float64)


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
