"""Draws tokens from logits, in plain torch: greedy, temperature, top-k, top-p, min-p.

A draw is a function of (logits, parameters, seed, position) alone. The noise
is Gumbel noise from a counter-based generator:

    token = argmax over i of  logits[i] / temperature + gumbel(seed, position, i)

which is distributed as softmax(logits / temperature) (the Gumbel-max trick).

All values that a row's token depends on are computed per element or in sums that are exact in
any order, so neither other rows nor a device's way of splitting a sum can change the token.
"""

import math

import torch

from kernels.dispatch import kernel
from kernels.row_state import DrawTable

__all__ = ["draw_random", "draw_tokens", "philox4x32", "scaled_logits", "token_logprobs"]

_WEIGHT_SCALE = 2.0**32
_WORD_MASK = 0xFFFFFFFF
_PART_ELEMENTS = 2**23  # of 8 bytes each; bounds the memory that drawing needs
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)

Words2 = tuple[torch.Tensor, torch.Tensor]
Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@kernel("logits.device", "logits.dtype")
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
    """Draws a token for each of `draw_ids`. Implementations do not wait for the device.

    Args:
        logits: `[rows, vocab]` float32.
        maxima: `[rows]` float32; the first result of `row_maxima`.
        likeliest: `[rows]` int64; the second result of `row_maxima`.
        draws: sampling parameters.
        draw_ids: `[n]` int64; the entry of `draws` that each draw uses.
        positions: `[n]` int64, below 2**32; the position of each drawn token.
        logit_rows: `[n]` int64; the row that each draw uses. None: draw i uses row i.
        filtered: whether any draw may filter by top-k, top-p or min-p; if not, all tokens are kept.
        out: `[n]` int64 that receives the tokens and is returned.

    Returns:
        `[n]` int64 token ids; the likeliest token if that is negative, which stands for none. Such
        rows do not affect other draws.
    """
    if logit_rows is None:
        rows = slice(len(draw_ids))
        logits, maxima, likeliest = logits[rows], maxima[rows], likeliest[rows]
    else:
        logits = logits.index_select(0, logit_rows)
        maxima = maxima.index_select(0, logit_rows)
        likeliest = likeliest.index_select(0, logit_rows)
    chosen = draws.take(draw_ids)
    tokens = likeliest.clone() if out is None else out.copy_(likeliest)
    is_drawn = (chosen.temperature > 0) & (likeliest >= 0)
    draws_per_part = max(1, _PART_ELEMENTS // logits.shape[-1])
    for part in torch.split(is_drawn.nonzero().flatten(), draws_per_part):
        tokens[part] = draw_random(
            logits[part], maxima[part], chosen.take(part), positions[part], filtered=filtered
        )
    return tokens


def draw_random(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    draws: DrawTable,
    positions: torch.Tensor,
    *,
    filtered: bool,
) -> torch.Tensor:
    """Draws a token from each row: `[n]` int64, undefined for temperatures of 0.

    Args:
        logits: `[n, vocab]` float32.
        maxima: `[n]` float32; the largest value of each row.
        draws: sampling parameters of `n` draws.
        positions: `[n]` int64.
        filtered: whether to apply top-k, top-p and min-p.
    """
    scaled = scaled_logits(logits, maxima, draws, filtered=filtered)
    return (scaled + _gumbel_noise(draws.seed, positions, logits.shape[-1])).argmax(dim=-1)


def scaled_logits(
    logits: torch.Tensor, maxima: torch.Tensor, draws: DrawTable, *, filtered: bool
) -> torch.Tensor:
    """Returns logits of the distributions that tokens are drawn from, `[n, vocab]` float64.

    Args:
        logits: `[n, vocab]` float32.
        maxima: `[n]` float32; the largest value of each row.
        draws: sampling parameters of `n` draws. No temperature is 0.
        filtered: whether to apply the filters; tokens that are not kept get -inf.
    """
    # Distances to the maximum, so that no temperature, however small, overflows.
    distance = logits.double() - maxima.unsqueeze(-1)  # [n, vocab], <= 0
    scaled = distance / draws.temperature.unsqueeze(-1)
    if filtered:
        scaled = scaled.masked_fill(scaled < _thresholds(scaled, draws), -torch.inf)
    return scaled


@kernel("logits.device", "logits.dtype")
def token_logprobs(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    tokens: torch.Tensor,
    logit_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the log-softmax of rows of logits, each at one token.

    Args:
        logits: `[rows, vocab]` float32.
        maxima: `[rows]` float32; the largest value of each row.
        tokens: `[n]` int64.
        logit_rows: `[n]` int64; the row of each token. None: token i uses row i.

    Returns:
        `[n]` float32; NaN for tokens below 0, and in rows whose maximum is not finite.
    """
    if logit_rows is None:
        logits, maxima = logits[: len(tokens)], maxima[: len(tokens)]
    else:
        logits, maxima = logits.index_select(0, logit_rows), maxima.index_select(0, logit_rows)
    distance = logits - maxima.unsqueeze(-1)
    at_tokens = distance.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    logprobs = at_tokens - distance.exp().sum(dim=-1).log()
    return logprobs.masked_fill(tokens < 0, math.nan)


def _thresholds(scaled: torch.Tensor, draws: DrawTable) -> torch.Tensor:
    """Returns the lowest scaled logit that top-k, then top-p, and min-p keep: `[n, 1]`.

    Tokens that tie with the last one kept are kept too, since their order is arbitrary.
    Top-p counts probabilities in whole units of 2**-32 of the largest: below 2**21 tokens their
    float64 sums are exact in any order. Min-p counts all tokens.
    """
    ordered = scaled.sort(dim=-1, descending=True).values
    vocab_size = scaled.shape[-1]
    top_k, top_p = draws.top_k.unsqueeze(-1), draws.top_p.unsqueeze(-1)
    num_top = top_k.where(top_k > 0, vocab_size).clamp(max=vocab_size)
    kth = ordered.gather(-1, num_top - 1)
    weights = (ordered.exp() * _WEIGHT_SCALE).round().masked_fill(ordered < kth, 0.0)
    weight_ahead = weights.cumsum(dim=-1) - weights  # [n, vocab], ascending
    kept = weight_ahead < top_p * weights.sum(dim=-1, keepdim=True)
    num_kept = kept.sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = ordered.gather(-1, num_kept - 1).where(top_p < 1, kth)
    return threshold.maximum(draws.log_min_p.unsqueeze(-1))


def _gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns standard Gumbel noise `[n, vocab]` float64, a function of (seed, position, token id).

    Token i uses word i % 4 of Philox's output at counter (i // 4, position,
    0, 0) under the seed as key. Uniforms are centred in their 2**-32 wide
    cells, exact in float64, so never 0 or 1.
    """
    counters = torch.arange((vocab_size + 3) // 4, device=positions.device)
    positions = positions.unsqueeze(-1)
    zero = torch.zeros_like(positions)
    key = seeds.unsqueeze(-1) & _WORD_MASK, (seeds.unsqueeze(-1) >> 32) & _WORD_MASK
    words = philox4x32((counters, positions, zero, zero), key)
    uniform = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size].double()
    uniform = (uniform + 0.5) * 2.0**-32
    return -(-uniform.log()).log()


def philox4x32(counter: Words4, key: Words2) -> Words4:
    """Philox4x32-10, a counter-based random number generator: four words per counter and key.

    A word is a function of (key, counter) alone, so it is the same on every device and in any
    order. Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC
    2011; Triton's `tl.philox` computes the same.

    Args:
        counter: four tensors of 32-bit words.
        key: two tensors of 32-bit words.

    All words are int64 tensors with values in [0, 2**32), whose shapes
    broadcast together; so are the words returned.
    """
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(_PHILOX_ROUNDS):
        high0, low0 = _multiply(word0, _PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply(word2, _PHILOX_MULTIPLIERS[1])
        word0, word1, word2, word3 = high1 ^ word1 ^ key0, low1, high0 ^ word3 ^ key1, low0
        key0 = (key0 + _PHILOX_KEY_INCREMENTS[0]) & _WORD_MASK
        key1 = (key1 + _PHILOX_KEY_INCREMENTS[1]) & _WORD_MASK
    return word0, word1, word2, word3


def _multiply(word: torch.Tensor, multiplier: int) -> Words2:
    """Returns the high and low half of a 32 x 32 bit product.

    An int64 product wraps, which keeps all 64 bits; the sign bits that the shift brings in are
    masked.
    """
    product = word * multiplier
    return (product >> 32) & _WORD_MASK, product & _WORD_MASK
