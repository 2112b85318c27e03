"""The state of running sequences on a device: positions, tokens, block tables, sampling parameters.

The tensors keep their addresses, so that a recorded step reads what the step before it wrote.
"""

from dataclasses import dataclass, field, fields
from typing import Final

import numpy as np
import torch

__all__ = [
    "DRAW_RECORD",
    "INVALID_TOKEN",
    "NO_TOKEN",
    "DecodeInputs",
    "DrawTable",
    "RowState",
    "RuleTable",
    "draw_kinds",
]

INVALID_TOKEN: Final = -1
"""The token id of rows whose logits hold NaN or infinity, or no finite number."""

NO_TOKEN: Final = -2
"""The token id of rows whose logits have no finite largest number after the rules were applied."""


_FLOAT, _INTEGER, _UNSIGNED = ({"type": kind} for kind in (np.float64, np.int64, np.uint64))


@dataclass(frozen=True, slots=True, eq=False)
class DrawTable:
    """Sampling parameters, a row for each way of drawing a token.

    The columns are declared here alone: `DRAW_RECORD` is made of them, `DrawTokens` of
    kernels/native/src/commands.h has them in the same order. All but the seed, which comes last,
    have the names of attributes of `SamplingParams`.

    Attributes:
        temperature: `[m]` float64; 0 takes the likeliest token.
        top_k: `[m]` int64; how many of the likeliest tokens are drawn from. 0: all.
        top_p: `[m]` float64; what share of the probability is drawn from. 1: all.
        log_min_p: `[m]` float64; logarithm of the least share of the likeliest token's
            probability that a token must have. -inf: all are drawn from.
        seed: `[m]` int64; the bits of the unsigned 64-bit seed of the noise.
    """

    temperature: torch.Tensor = field(metadata=_FLOAT)
    top_k: torch.Tensor = field(metadata=_INTEGER)
    top_p: torch.Tensor = field(metadata=_FLOAT)
    log_min_p: torch.Tensor = field(metadata=_FLOAT)
    seed: torch.Tensor = field(metadata=_UNSIGNED)

    @classmethod
    def of_words(cls, words: torch.Tensor) -> "DrawTable":
        """Returns the table whose columns have the bits of `words`, `[columns, m]` int64, as views
        of the same memory.
        """
        columns = zip(words.unbind(), _ARE_FLOATS, strict=True)
        return cls(*[column.view(torch.float64) if real else column for column, real in columns])

    @property
    def columns(self) -> tuple[torch.Tensor, ...]:
        """The attributes, in their order."""
        return tuple(getattr(self, column.name) for column in fields(self))

    def take(self, draw_ids: torch.Tensor) -> "DrawTable":
        """Returns the rows `draw_ids`, `[n]` int64, as a copy."""
        return DrawTable(*(column.index_select(0, draw_ids) for column in self.columns))

    def part(self, entries: slice) -> "DrawTable":
        """Returns a slice of the rows as views of the same memory."""
        return DrawTable(*(column[entries] for column in self.columns))


DRAW_RECORD = np.dtype([(column.name, column.metadata["type"]) for column in fields(DrawTable)])
"""A row of a `DrawTable` as an element of an array."""
_ARE_FLOATS = tuple(column.metadata["type"] is np.float64 for column in fields(DrawTable))


def draw_kinds(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which of `[n]` of `DRAW_RECORD` are not greedy, and which of those filter by top-k,
    top-p or min-p, each as `[n]` bool.
    """
    is_random = records["temperature"] > 0
    has_limit = (records["top_k"] > 0) | (records["top_p"] < 1)
    return is_random, is_random & (has_limit | (records["log_min_p"] > -np.inf))


@dataclass(frozen=True, slots=True, eq=False)
class RuleTable:
    """Rules that change logits before a token is drawn from them, a row for each sequence.

    All tensors are contiguous. Tokens are ids below the vocabulary size; -1 pads lists of them.

    Attributes:
        history: `[m, max_len]` int32; the sequence's tokens by position, from prompt and output.
            Entries past the sequence's length may hold anything.
        lengths: `[m, 2]` int64; the prompt's length, and the length before which no token of
            `stop_ids` may be drawn.
        penalties: `[m, 3]` float32; of repetition (1: off), of presence and of frequency (0: off).
        bias_ids: `[m, num_biases]` int32; tokens whose logits change, all different.
        biases: `[m, num_biases]` float32; what is added to the logits of `bias_ids`.
        stop_ids: `[m, num_stops]` int32.
        bad_words: `[m, num_words, word_len]` int32; sequences of tokens that end at the last
            column, with padding before them. Its last token must not follow the tokens before it.
        allowed: `[m, ceil(vocab / 32)]` int32; bit t % 32 of word t // 32 is set if token t may be
            drawn.
    """

    history: torch.Tensor
    lengths: torch.Tensor
    penalties: torch.Tensor
    bias_ids: torch.Tensor
    biases: torch.Tensor
    stop_ids: torch.Tensor
    bad_words: torch.Tensor
    allowed: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowState:
    """A row per running sequence; the last row is a spare one that padding refers to.

    Attributes:
        tables: `[num_layer_groups, num_rows, max_blocks]` int32 block ids, contiguous.
        positions: `[num_rows]` int64; position of the token that runs next. The spare row's
            stays 0.
        last_tokens: `[num_rows]` int64; the token drawn last, which runs next.
        draws: sampling parameters, `num_rows` of them.
    """

    tables: torch.Tensor
    positions: torch.Tensor
    last_tokens: torch.Tensor
    draws: DrawTable


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """Inputs of a step of `n` sequences that run one token each.

    Attributes:
        token_ids: `[n]` int64; the tokens to run.
        positions: `[n]` int64; positions of these tokens.
        draw_positions: `[n]` int64; positions of the tokens to draw.
        query_starts: `[n + 1]` int32; 0 to n, the same in every step.
        context_lens: `[n]` int32; tokens of each sequence, including the one that runs.
        tables: `[num_layer_groups, n, max_blocks]` int32; entries past a context's last block may
            hold anything.
        slots: `[num_layer_groups, n]` int64; the KV slots that the tokens write to.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    draw_positions: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor
