"""Draws tokens from logits: greedy, temperature, top-k, top-p.

A draw is a function of (logits, parameters, seed, position) alone. The noise
is Gumbel noise from a counter-based generator:

    token = argmax over i of  logits[i] / temperature + gumbel(seed, position, i)

which is distributed as softmax(logits / temperature) (the Gumbel-max trick).

Everything a row's token depends on is computed per element or in sums that
are exact in any order, so neither batch neighbours nor a device's way of
splitting a sum can change it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.batch import DrawParams
from engine.runtime.philox import philox4x32

__all__ = ["INVALID_TOKEN", "RandomDraws", "draw_tokens", "prepare_draws", "sample"]

INVALID_TOKEN = -1
"""In `sample`'s result: the row's logits hold NaN or infinity, or no finite number."""

_CHUNK_ELEMENTS = 2**23  # of 8 bytes; bounds the memory that drawing takes
_WEIGHT_SCALE = 2.0**32


@dataclass(frozen=True, slots=True)
class RandomDraws:
    """Parameters of rows that draw at random, on the logits' device.

    Either all rows of one `RandomDraws` filter by top-k or top-p, or none.

    Attributes:
        rows: `[n]` int64; which rows of the logits these are.
        temperature: `[n, 1]` float64, above 0.
        top_k: `[n, 1]` int64; 0 keeps all.
        top_p: `[n, 1]` float64.
        seed_low: `[n, 1]` int64; the seed's lower 32 bits.
        seed_high: `[n, 1]` int64; the seed's upper 32 bits.
        position: `[n, 1]` int64.
        filtered: whether top-k or top-p is to be applied.
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed_low: torch.Tensor
    seed_high: torch.Tensor
    position: torch.Tensor
    filtered: bool

    def split(self, num_rows: int) -> Iterator["RandomDraws"]:
        """Parts of at most `num_rows` rows."""
        for start in range(0, len(self.rows), num_rows):
            part = slice(start, start + num_rows)
            yield RandomDraws(
                rows=self.rows[part],
                temperature=self.temperature[part],
                top_k=self.top_k[part],
                top_p=self.top_p[part],
                seed_low=self.seed_low[part],
                seed_high=self.seed_high[part],
                position=self.position[part],
                filtered=self.filtered,
            )


def draw_tokens(
    logits: torch.Tensor, draws: Sequence[DrawParams], positions: Sequence[int]
) -> list[int | None]:
    """Draws one token per row.

    Args:
        logits: `[rows, vocab]` float32.
        draws: how to draw each row's token.
        positions: position of the token to draw, per row.

    Returns:
        Token ids; None where a row's logits hold NaN or infinity, or no
        finite number. Such a row changes no other.
    """
    random_draws = prepare_draws(draws, positions, logits.device)
    tokens: list[int] = sample(logits, random_draws).tolist()
    return [None if token == INVALID_TOKEN else token for token in tokens]


def prepare_draws(
    draws: Sequence[DrawParams], positions: Sequence[int], device: torch.device
) -> tuple[RandomDraws, ...]:
    """Puts the parameters of all rows that are not greedy on the device."""
    rows = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    filtered = {row for row in rows if draws[row].top_k > 0 or draws[row].top_p < 1}
    groups = (
        ([row for row in rows if row not in filtered], False),
        ([row for row in rows if row in filtered], True),
    )
    return tuple(
        _random_draws(group, draws, positions, device, filtered=is_filtered)
        for group, is_filtered in groups
        if group
    )


def _random_draws(
    rows: Sequence[int],
    draws: Sequence[DrawParams],
    positions: Sequence[int],
    device: torch.device,
    *,
    filtered: bool,
) -> RandomDraws:
    def column(values: list[int] | list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).unsqueeze(-1).to(device, non_blocking=True)

    return RandomDraws(
        rows=torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True),
        temperature=column([draws[row].temperature for row in rows], torch.float64),
        top_k=column([draws[row].top_k for row in rows], torch.int64),
        top_p=column([draws[row].top_p for row in rows], torch.float64),
        seed_low=column([draws[row].seed & 0xFFFFFFFF for row in rows], torch.int64),
        seed_high=column([draws[row].seed >> 32 for row in rows], torch.int64),
        position=column([positions[row] for row in rows], torch.int64),
        filtered=filtered,
    )


def sample(logits: torch.Tensor, random_draws: Sequence[RandomDraws]) -> torch.Tensor:
    """Draws one token per row; does not wait for the device.

    Args:
        logits: `[rows, vocab]` float32.
        random_draws: from `prepare_draws`; rows in none of them are greedy,
            the lowest token id winning ties.

    Returns:
        `[rows]` int64 token ids, `INVALID_TOKEN` where none can be drawn.
    """
    maxima, tokens = logits.max(dim=-1)
    rows_per_chunk = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    for draws in random_draws:
        for chunk in draws.split(rows_per_chunk):
            tokens[chunk.rows] = _draw_random(logits[chunk.rows], maxima[chunk.rows], chunk)
    return tokens.where(maxima.isfinite(), INVALID_TOKEN)


def _draw_random(logits: torch.Tensor, maxima: torch.Tensor, draws: RandomDraws) -> torch.Tensor:
    """Tokens `[n]` for logits `[n, vocab]`, whose row maxima are `[n]`."""
    # From the maximum down, so that no temperature, however small, overflows.
    scaled = (logits.double() - maxima.unsqueeze(-1)) / draws.temperature  # [n, vocab], <= 0
    if draws.filtered:
        scaled = scaled.masked_fill(scaled < _thresholds(scaled, draws), -torch.inf)
    return (scaled + _gumbel_noise(draws, logits.shape[-1])).argmax(dim=-1)


def _thresholds(scaled: torch.Tensor, draws: RandomDraws) -> torch.Tensor:
    """The lowest scaled logit that top-k, then top-p keep: `[n, 1]`.

    Tokens that tie with the last one kept are kept too, as no order among them
    means anything. Top-p counts probabilities in whole units of 2**-32 of the
    largest: below 2**21 tokens their float64 sums are exact in any order.
    """
    ordered = scaled.sort(dim=-1, descending=True).values
    vocab_size = scaled.shape[-1]
    num_top = draws.top_k.where(draws.top_k > 0, vocab_size).clamp(max=vocab_size)
    kth = ordered.gather(-1, num_top - 1)
    weights = (ordered.exp() * _WEIGHT_SCALE).round().masked_fill(ordered < kth, 0.0)
    weight_ahead = weights.cumsum(dim=-1) - weights  # [n, vocab], ascending
    kept = weight_ahead < draws.top_p * weights.sum(dim=-1, keepdim=True)
    num_kept = kept.sum(dim=-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, num_kept - 1).where(draws.top_p < 1, kth)


def _gumbel_noise(draws: RandomDraws, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise `[n, vocab]` float64 of (seed, position, token id).

    Token i takes word i % 4 of Philox's output at counter (i // 4, position,
    0, 0) under the seed as key. Uniforms are centred in their 2**-32 wide
    cells, exact in float64, so never 0 or 1.
    """
    counters = torch.arange((vocab_size + 3) // 4, device=draws.position.device)
    zero = torch.zeros_like(draws.position)
    words = philox4x32((counters, draws.position, zero, zero), (draws.seed_low, draws.seed_high))
    uniform = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size].double()
    uniform = (uniform + 0.5) * 2.0**-32
    return -(-uniform.log()).log()
