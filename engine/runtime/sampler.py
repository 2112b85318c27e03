"""Draws a step's tokens with torch, in parts of bounded size.

`kernels.reference.sampling` defines how a token is drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import INVALID_TOKEN, DrawParams
from engine.runtime.device import to_device
from kernels.reference.sampling import draw_random
from kernels.row_state import DrawTable

__all__ = [
    "DRAW_RECORD",
    "PreparedDraws",
    "RandomDraws",
    "Scores",
    "draw_kinds",
    "draw_record",
    "draw_table",
    "draw_words",
    "prepare_draws",
    "sample",
    "table_of_words",
]

DRAW_RECORD = np.dtype(
    [("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("seed", "u8")]
)  # `DrawParams` as an element of an array

_CHUNK_ELEMENTS = 2**23  # of 8 bytes each; bounds the memory that drawing needs


@dataclass(frozen=True, slots=True)
class RandomDraws:
    """Draws that are not greedy, on the logits' device.

    Attributes:
        draws: `[n]` int64; indices among the step's draws.
        rows: `[n]` int64; per draw, the row of the logits that it draws from.
        table: the parameters of the `n` draws. No temperature is 0.
        filtered: whether all of them filter by top-k or top-p; otherwise none does.
    """

    draws: torch.Tensor
    rows: torch.Tensor
    table: DrawTable
    filtered: bool

    def split(self, num_draws: int) -> Iterator["RandomDraws"]:
        """Yields parts of at most `num_draws` draws."""
        for start in range(0, len(self.draws), num_draws):
            part = slice(start, start + num_draws)
            yield RandomDraws(
                self.draws[part], self.rows[part], self.table.part(part), self.filtered
            )


@dataclass(frozen=True, slots=True)
class PreparedDraws:
    """A step's draws on the logits' device; reusable while the same rows draw.

    Attributes:
        rows: `[n]` int64; per draw, the row of the logits that it draws from. None
            if draw i draws from row i.
        random: the draws that are not greedy.
    """

    rows: torch.Tensor | None
    random: tuple[RandomDraws, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """Rows of logits and their maxima.

    Attributes:
        logits: `[rows, vocab]` float32.
        maxima: `[rows]` float32; the maximum of each row.
        likeliest: `[rows]` int64; the lowest token id with the maximum. `INVALID_TOKEN`
            if a row holds NaN or infinity, or no finite number.
        hidden: `[num_tokens, hidden_size]`; the final hidden states of all tokens of the
            step, if it needs them.
    """

    logits: torch.Tensor
    maxima: torch.Tensor
    likeliest: torch.Tensor
    hidden: torch.Tensor | None = None

    def last(self, num_rows: int) -> "Scores":
        """Returns the scores of the last `num_rows` rows."""
        start = len(self.likeliest) - num_rows
        if not start:
            return self
        return Scores(self.logits[start:], self.maxima[start:], self.likeliest[start:])


def draw_record(draw: DrawParams) -> tuple[float, int, float, int]:
    """Returns the parameters as an element of a `DRAW_RECORD` array."""
    return draw.temperature, draw.top_k, draw.top_p, draw.seed


def draw_kinds(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which of `[n]` of `DRAW_RECORD` are not greedy, and which of those filter by top-k or
    top-p, each as `[n]` bool.
    """
    is_random = records["temperature"] > 0
    return is_random, is_random & ((records["top_k"] > 0) | (records["top_p"] < 1))


def draw_words(records: np.ndarray) -> np.ndarray:
    """Returns `[n]` of `DRAW_RECORD` as `[4, n]` int64: the bits of each field in one row."""
    return np.ascontiguousarray(records.view(np.int64).reshape(len(records), -1).T)


def table_of_words(words: torch.Tensor) -> DrawTable:
    """Returns the table of the words that `draw_words` made, as views of the same memory."""
    temperature, top_k, top_p, seed = words
    return DrawTable(temperature.view(torch.float64), top_k, top_p.view(torch.float64), seed)


def draw_table(records: np.ndarray, device: torch.device) -> DrawTable:
    """Copies `[n]` of `DRAW_RECORD` to the device."""
    return table_of_words(to_device(draw_words(records), device))


def prepare_draws(
    records: np.ndarray, device: torch.device, rows: Sequence[int] | None = None
) -> PreparedDraws:
    """Copies draw parameters to the device.

    Args:
        records: `[n]` of `DRAW_RECORD`.
        device: the logits' device.
        rows: per draw, the row of the logits that it draws from; None if draw i draws from
            row i.
    """
    row_ids = np.arange(len(records)) if rows is None else np.array(rows, np.int64)
    is_random, is_filtered = draw_kinds(records)
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
    return RandomDraws(
        draws=to_device(chosen, device),
        rows=to_device(row_ids[chosen], device),
        table=draw_table(records[chosen], device),
        filtered=filtered,
    )


def sample(scores: Scores, prepared: PreparedDraws, positions: np.ndarray) -> torch.Tensor:
    """Draws tokens; does not wait for the device.

    Args:
        scores: scores of the rows.
        prepared: the `n` draws; greedy ones take the likeliest token.
        positions: `[n]` int64; per draw, the position of the token.

    Returns:
        `[n]` int64 token ids; `INVALID_TOKEN` if the row's logits hold NaN or
        infinity, or no finite number. Such a row does not affect the others.
    """
    rows = prepared.rows
    tokens = scores.likeliest if rows is None else scores.likeliest[rows]
    if not prepared.random:
        return tokens
    logits, drawn = scores.logits, tokens.clone()
    draws_per_part = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    places = to_device(positions, logits.device)
    for random in prepared.random:
        for part in random.split(draws_per_part):
            drawn[part.draws] = draw_random(
                logits[part.rows],
                scores.maxima[part.rows],
                part.table,
                places[part.draws],
                filtered=part.filtered,
            )
    return drawn.where(tokens != INVALID_TOKEN, INVALID_TOKEN)
