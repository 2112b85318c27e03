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

import numpy as np
import torch

from engine.batch import INVALID_TOKEN, DrawParams
from engine.runtime.device import to_device
from engine.runtime.philox import philox4x32

__all__ = [
    "DRAW_RECORD",
    "PreparedDraws",
    "RandomDraws",
    "Scores",
    "draw_record",
    "prepare_draws",
    "sample",
]

DRAW_RECORD = np.dtype(
    [("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("seed", "u8")]
)  # `DrawParams` as an element of an array

_CHUNK_ELEMENTS = 2**23  # of 8 bytes; bounds the memory that drawing takes
_WEIGHT_SCALE = 2.0**32


@dataclass(frozen=True, slots=True)
class RandomDraws:
    """Draws that are not greedy, on the logits' device.

    Either all of one `RandomDraws` filter by top-k or top-p, or none.

    Attributes:
        draws: `[n]` int64; which of the step's draws these are.
        rows: `[n]` int64; the row of the logits that each draws from.
        temperature: `[n, 1]` float64, above 0.
        top_k: `[n, 1]` int64; 0 keeps all.
        top_p: `[n, 1]` float64.
        seed_low: `[n, 1]` int64; the seed's lower 32 bits.
        seed_high: `[n, 1]` int64; the seed's upper 32 bits.
        filtered: whether top-k or top-p is to be applied.
    """

    draws: torch.Tensor
    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed_low: torch.Tensor
    seed_high: torch.Tensor
    filtered: bool

    def split(self, num_draws: int) -> Iterator["RandomDraws"]:
        """Parts of at most `num_draws` draws."""
        for start in range(0, len(self.draws), num_draws):
            part = slice(start, start + num_draws)
            yield RandomDraws(
                draws=self.draws[part],
                rows=self.rows[part],
                temperature=self.temperature[part],
                top_k=self.top_k[part],
                top_p=self.top_p[part],
                seed_low=self.seed_low[part],
                seed_high=self.seed_high[part],
                filtered=self.filtered,
            )


@dataclass(frozen=True, slots=True)
class PreparedDraws:
    """A step's draws on the logits' device; the same while the same rows draw.

    Attributes:
        rows: `[n]` int64; the row of the logits that each draws from. None:
            its own.
        random: those that are not greedy.
    """

    rows: torch.Tensor | None
    random: tuple[RandomDraws, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """What rows of logits are drawn from.

    Attributes:
        logits: `[rows, vocab]` float32.
        maxima: `[rows]` float32; of each row's logits.
        likeliest: `[rows]` int64; the lowest token id of the equals among the largest,
            `INVALID_TOKEN` where a row's logits hold NaN or infinity, or no finite number.
    """

    logits: torch.Tensor
    maxima: torch.Tensor
    likeliest: torch.Tensor

    def last(self, num_rows: int) -> "Scores":
        """Those of the last rows."""
        start = len(self.likeliest) - num_rows
        if not start:
            return self
        return Scores(self.logits[start:], self.maxima[start:], self.likeliest[start:])


def draw_record(draw: DrawParams) -> tuple[float, int, float, int]:
    """An element of an array of `DRAW_RECORD`."""
    return draw.temperature, draw.top_k, draw.top_p, draw.seed


def prepare_draws(
    records: np.ndarray, device: torch.device, rows: Sequence[int] | None = None
) -> PreparedDraws:
    """Puts what draws depend on, beside logits and position, on the device.

    Args:
        records: `[n]` of `DRAW_RECORD`.
        device: the logits'.
        rows: the row of the logits that each draws from, where not each from its own.
    """
    row_ids = np.arange(len(records)) if rows is None else np.array(rows, np.int64)
    is_random = records["temperature"] > 0
    is_filtered = is_random & ((records["top_k"] > 0) | (records["top_p"] < 1))
    kinds = ((is_random & ~is_filtered, False), (is_filtered, True))
    return PreparedDraws(
        rows=None if rows is None else to_device(row_ids, device),
        random=tuple(
            _random_draws(records, np.flatnonzero(chosen), row_ids, device, filtered=filtered)
            for chosen, filtered in kinds
            if chosen.any()
        ),
    )


def _random_draws(
    records: np.ndarray,
    chosen: np.ndarray,
    row_ids: np.ndarray,
    device: torch.device,
    *,
    filtered: bool,
) -> RandomDraws:
    def column(values: np.ndarray) -> torch.Tensor:
        return to_device(np.ascontiguousarray(values), device).unsqueeze(-1)

    of_chosen = records[chosen]
    seeds = of_chosen["seed"]
    return RandomDraws(
        draws=to_device(chosen, device),
        rows=to_device(row_ids[chosen], device),
        temperature=column(of_chosen["temperature"]),
        top_k=column(of_chosen["top_k"]),
        top_p=column(of_chosen["top_p"]),
        seed_low=column((seeds & np.uint64(0xFFFFFFFF)).astype(np.int64)),
        seed_high=column((seeds >> np.uint64(32)).astype(np.int64)),
        filtered=filtered,
    )


def sample(scores: Scores, prepared: PreparedDraws, positions: np.ndarray) -> torch.Tensor:
    """Draws tokens; does not wait for the device.

    Args:
        scores: of the rows.
        prepared: the draws; greedy ones take the likeliest token.
        positions: `[n]` int64; the position of the token that each draws.

    Returns:
        `[n]` int64 token ids; `INVALID_TOKEN` where the row's logits hold NaN
        or infinity, or no finite number. Such a row changes no other.
    """
    rows = prepared.rows
    tokens = scores.likeliest if rows is None else scores.likeliest[rows]
    if not prepared.random:
        return tokens
    logits, drawn = scores.logits, tokens.clone()
    draws_per_part = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    places = to_device(positions, logits.device).unsqueeze(-1)
    for random in prepared.random:
        for part in random.split(draws_per_part):
            drawn[part.draws] = _draw_random(
                logits[part.rows], scores.maxima[part.rows], part, places[part.draws]
            )
    return drawn.where(tokens != INVALID_TOKEN, INVALID_TOKEN)


def _draw_random(
    logits: torch.Tensor, maxima: torch.Tensor, draws: RandomDraws, positions: torch.Tensor
) -> torch.Tensor:
    """Tokens `[n]` for logits `[n, vocab]`, whose row maxima are `[n]`; positions are `[n, 1]`."""
    # From the maximum down, so that no temperature, however small, overflows.
    scaled = (logits.double() - maxima.unsqueeze(-1)) / draws.temperature  # [n, vocab], <= 0
    if draws.filtered:
        scaled = scaled.masked_fill(scaled < _thresholds(scaled, draws), -torch.inf)
    return (scaled + _gumbel_noise(draws, positions, logits.shape[-1])).argmax(dim=-1)


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


def _gumbel_noise(draws: RandomDraws, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise `[n, vocab]` float64 of (seed, position, token id).

    Token i takes word i % 4 of Philox's output at counter (i // 4, position,
    0, 0) under the seed as key. Uniforms are centred in their 2**-32 wide
    cells, exact in float64, so never 0 or 1.
    """
    counters = torch.arange((vocab_size + 3) // 4, device=positions.device)
    zero = torch.zeros_like(positions)
    words = philox4x32((counters, positions, zero, zero), (draws.seed_low, draws.seed_high))
    uniform = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size].double()
    uniform = (uniform + 0.5) * 2.0**-32
    return -(-uniform.log()).log()
