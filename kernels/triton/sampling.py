"""Draws tokens from logits, in Triton: the same tokens as `kernels.reference.sampling`.

All values that decide a token are computed per element in float64, or in exact sums.
"""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.row_state import DrawTable
from kernels.triton.draw_thresholds import find_thresholds, scale_logits
from kernels.triton.launch import launch_table

__all__ = ["draw_tokens", "token_logprobs"]

_TILES = 8  # blocks of a program, each of the size in the launch table


@TRITON.implements(reference.draw_tokens)
def draw_tokens(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    likeliest: torch.Tensor,
    draws: DrawTable,
    *,
    draw_ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor | None = None,
    filtered: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    count, vocab_size, device = len(draw_ids), logits.shape[-1], logits.device
    tokens = torch.empty(count, dtype=torch.int64, device=device) if out is None else out
    if not count:
        return tokens
    _check_rows(logits, count, logit_rows)
    vectors = (maxima, likeliest, *draws.columns, draw_ids, positions, tokens)
    assert all(vector.is_contiguous() for vector in vectors)
    thresholds = None
    if filtered:
        thresholds = find_thresholds(logits, maxima, likeliest, draws, draw_ids, logit_rows)
    launch = launch_table(device).draw_tokens.for_size(vocab_size)
    num_splits = triton.cdiv(vocab_size, launch.block_size * _TILES)
    best_scores = torch.empty((count, num_splits), dtype=torch.float64, device=device)
    best_tokens = torch.empty((count, num_splits), dtype=torch.int32, device=device)
    _draw_kernel[(count, num_splits)](
        logits,
        maxima,
        likeliest,
        draws.temperature,
        draws.seed,
        draw_ids,
        positions,
        logit_rows,
        thresholds,
        best_scores,
        best_tokens,
        logits.stride(0),
        vocab_size,
        BLOCK=launch.block_size,
        TILES=_TILES,
        num_warps=launch.num_warps,
    )
    _choose_kernel[(count,)](
        likeliest,
        draws.temperature,
        draw_ids,
        logit_rows,
        best_scores,
        best_tokens,
        tokens,
        num_splits,
        BLOCK=triton.next_power_of_2(num_splits),
        num_warps=1,
    )
    return tokens


# These addresses change from step to step, which must not cause another compilation.
@triton.jit(
    do_not_specialize_on_alignment=[
        "maxima",
        "likeliest",
        "temperatures",
        "seeds",
        "draw_ids",
        "positions",
        "logit_rows",
    ]
)
def _draw_kernel(
    logits,
    maxima,
    likeliest,
    temperatures,
    seeds,
    draw_ids,
    positions,
    logit_rows,
    thresholds,
    best_scores,
    best_tokens,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Finds `max over t of scaled[t] + gumbel(seed, position, t)` of the tokens that are kept.

    Program (i, j) finds draw i's best score among TILES tiles of BLOCK tokens, and the lowest
    token with that score. Token t uses word t % 4 of Philox at counter (t // 4, position, 0, 0).
    """
    draw, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = draw if logit_rows is None else tl.load(logit_rows + draw)
    draw_id = tl.load(draw_ids + draw)
    temperature = tl.load(temperatures + draw_id)
    if (temperature <= 0.0) | (tl.load(likeliest + row) < 0):
        return
    maximum = tl.load(maxima + row)
    seed, position = tl.load(seeds + draw_id), tl.load(positions + draw).to(tl.uint32)
    row_logits = logits + row * row_stride
    best_score = tl.full([BLOCK // 4], float("-inf"), tl.float64)
    best_token = tl.zeros([BLOCK // 4], tl.int32) + vocab_size
    first = split * (TILES * BLOCK)
    for start in range(first, tl.minimum(first + TILES * BLOCK, vocab_size), BLOCK):
        counters = start // 4 + tl.arange(0, BLOCK // 4)
        zero = counters * 0
        words = tl.philox(seed, counters, zero.to(tl.uint32) + position, zero, zero)
        for lane in tl.static_range(4):
            tokens = counters * 4 + lane
            mask = tokens < vocab_size
            values = tl.load(row_logits + tokens, mask=mask, other=float("-inf"))
            scaled = scale_logits(values, maximum, temperature)
            uniform = (words[lane].to(tl.float64) + 0.5) * (2.0**-32)
            score = scaled - tl.log(-tl.log(uniform))
            if thresholds is not None:
                score = tl.where(scaled < tl.load(thresholds + draw), float("-inf"), score)
            # Later tokens have higher ids: among equal scores the first stays.
            is_better = score > best_score
            best_score = tl.where(is_better, score, best_score)
            best_token = tl.where(is_better, tokens, best_token)
    best = tl.max(best_score)
    place = draw * tl.num_programs(1) + split
    tl.store(best_scores + place, best)
    tl.store(best_tokens + place, tl.min(tl.where(best_score == best, best_token, vocab_size)))


# These addresses change from step to step, which must not cause another compilation.
@triton.jit(
    do_not_specialize_on_alignment=["likeliest", "temperatures", "draw_ids", "logit_rows", "out"]
)
def _choose_kernel(
    likeliest,
    temperatures,
    draw_ids,
    logit_rows,
    best_scores,
    best_tokens,
    out,
    num_splits,
    BLOCK: tl.constexpr,
):
    """`out[i]`: the token of the best of draw i's splits, the first among equal scores.

    It is the likeliest token if the draw is greedy or that token is invalid. Program i: draw i.
    """
    draw = tl.program_id(0).to(tl.int64)
    row = draw if logit_rows is None else tl.load(logit_rows + draw)
    token = tl.load(likeliest + row)
    is_drawn = (tl.load(temperatures + tl.load(draw_ids + draw)) > 0.0) & (token >= 0)
    splits = tl.arange(0, BLOCK)
    mask = splits < tl.where(is_drawn, num_splits, 0)
    scores = tl.load(best_scores + draw * num_splits + splits, mask=mask, other=float("-inf"))
    tokens = tl.load(best_tokens + draw * num_splits + splits, mask=mask, other=0x7FFFFFFF)
    drawn = tl.min(tl.where(scores == tl.max(scores), tokens, 0x7FFFFFFF))
    tl.store(out + draw, tl.where(is_drawn, drawn.to(tl.int64), token))


@TRITON.implements(reference.token_logprobs)
def token_logprobs(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    tokens: torch.Tensor,
    logit_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Skips the sums of tokens below 0."""
    count, vocab_size, device = len(tokens), logits.shape[-1], logits.device
    logprobs = torch.empty(count, dtype=torch.float32, device=device)
    if not count:
        return logprobs
    _check_rows(logits, count, logit_rows)
    assert maxima.is_contiguous()
    assert tokens.is_contiguous()
    launch = launch_table(device).token_logprobs.for_size(vocab_size)
    num_splits = triton.cdiv(vocab_size, launch.block_size * _TILES)
    sums = torch.empty((count, num_splits), dtype=torch.float32, device=device)
    _exp_sums_kernel[(count, num_splits)](
        logits,
        maxima,
        tokens,
        logit_rows,
        sums,
        logits.stride(0),
        vocab_size,
        BLOCK=launch.block_size,
        TILES=_TILES,
        num_warps=launch.num_warps,
    )
    _logprobs_kernel[(count,)](
        logits,
        maxima,
        tokens,
        logit_rows,
        sums,
        logprobs,
        logits.stride(0),
        num_splits,
        BLOCK=triton.next_power_of_2(num_splits),
        num_warps=1,
    )
    return logprobs


# These addresses change from step to step, which must not cause another compilation.
@triton.jit(do_not_specialize_on_alignment=["maxima", "logit_rows", "tokens"])
def _exp_sums_kernel(
    logits,
    maxima,
    tokens,
    logit_rows,
    sums,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """`sum of exp(logits - maximum)`; program (i, j) adds TILES tiles of BLOCK of token i's row."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = index if logit_rows is None else tl.load(logit_rows + index)
    maximum = tl.load(maxima + row)
    if _is_nan(maximum, tl.load(tokens + index)):
        return
    row_logits = logits + row * row_stride
    partial = tl.zeros([BLOCK], tl.float32)
    first = split * (TILES * BLOCK)
    for start in range(first, tl.minimum(first + TILES * BLOCK, vocab_size), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < vocab_size
        values = tl.load(row_logits + columns, mask=mask, other=float("-inf"))
        partial += tl.exp(values - maximum)
    tl.store(sums + index * tl.num_programs(1) + split, tl.sum(partial))


# These addresses change from step to step, which must not cause another compilation.
@triton.jit(do_not_specialize_on_alignment=["maxima", "logit_rows", "tokens", "out"])
def _logprobs_kernel(
    logits,
    maxima,
    tokens,
    logit_rows,
    sums,
    out,
    row_stride,
    num_splits,
    BLOCK: tl.constexpr,
):
    """`out[i] = logits[tokens[i]] - maximum - log(sum of exp(logits - maximum))`; program i."""
    index = tl.program_id(0).to(tl.int64)
    row = index if logit_rows is None else tl.load(logit_rows + index)
    maximum, token = tl.load(maxima + row), tl.load(tokens + index)
    if _is_nan(maximum, token):
        tl.store(out + index, float("nan"))
        return
    splits = tl.arange(0, BLOCK)
    mask = splits < num_splits
    partial = tl.load(sums + index * num_splits + splits, mask=mask, other=0.0)
    distance = tl.load(logits + row * row_stride + token).to(tl.float64) - maximum.to(tl.float64)
    logprob = distance - tl.log(tl.sum(partial.to(tl.float64)))
    tl.store(out + index, logprob.to(tl.float32))


@triton.jit
def _is_nan(maximum, token):
    """Returns whether the token is invalid or its row's maximum is not finite."""
    return (token < 0) | ((tl.abs(maximum) < float("inf")) == 0)


def _check_rows(logits: torch.Tensor, count: int, logit_rows: torch.Tensor | None) -> None:
    """Asserts the layout of rows, and that each of `count` draws has a row."""
    assert logits.stride(1) == 1
    if logit_rows is None:
        assert len(logits) >= count
    else:
        assert len(logit_rows) == count
        assert logit_rows.is_contiguous()
