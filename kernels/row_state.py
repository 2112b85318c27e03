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
    "DrawTable",
    "RowState",
    "RuleTable",
    "SentSequences",
    "SequenceInputs",
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
class SentSequences:
    """What the host sends of a step's `n` sequences, whose `t` tokens are laid end to end.

    Attributes:
        row_ids: `[n]` int64; their rows.
        starts: `[n]` int64; position of the first token of each; -1 for the row's own position.
        query_starts: `[n + 1]` int64; sequence i runs the tokens `query_starts[i]` to
            `query_starts[i + 1]`, or none.
        num_unkept: `[n]` int64; as in `AttentionMetadata`.
        token_ids: `[t]` int64; -1 for the token that the row drew last.
    """

    row_ids: torch.Tensor
    starts: torch.Tensor
    query_starts: torch.Tensor
    num_unkept: torch.Tensor
    token_ids: torch.Tensor

    @classmethod
    def of_words(cls, words: torch.Tensor, num_seqs: int, num_tokens: int) -> "SentSequences":
        """Returns views of `[4n + 1 + t]` int64, where the attributes lie in their order."""
        sizes = [num_seqs, num_seqs, num_seqs + 1, num_seqs, num_tokens]
        return cls(*torch.split(words, sizes))

    @staticmethod
    def num_words(num_seqs: int, num_tokens: int) -> int:
        """Returns how many words the attributes are."""
        return 4 * num_seqs + 1 + num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class SequenceInputs:
    """Inputs of a step's `n` sequences, whose `t` tokens are laid end to end.

    Attributes:
        token_ids: `[t]` int64; the tokens to run.
        positions: `[t]` int64; positions of these tokens.
        draw_positions: `[t]` int64; positions of the tokens that follow them.
        query_starts: `[n + 1]` int32; as in `SentSequences`.
        context_lens: `[n]` int32; tokens of each sequence, including those that run.
        num_unkept: `[n]` int32; as in `AttentionMetadata`.
        tables: `[num_layer_groups, n, max_blocks]` int32; entries past a context's last block may
            hold anything.
        slots: `[num_layer_groups, t]` int64; the KV slots that the tokens write to.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    draw_positions: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    num_unkept: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def allocate(
        cls,
        num_layer_groups: int,
        num_seqs: int,
        num_tokens: int,
        max_blocks: int,
        device: torch.device,
    ) -> "SequenceInputs":
        """Allocates zeros."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(num_tokens),
            positions=zeros(num_tokens),
            draw_positions=zeros(num_tokens),
            query_starts=zeros(num_seqs + 1, dtype=torch.int32),
            context_lens=zeros(num_seqs, dtype=torch.int32),
            num_unkept=zeros(num_seqs, dtype=torch.int32),
            tables=zeros(num_layer_groups, num_seqs, max_blocks, dtype=torch.int32),
            slots=zeros(num_layer_groups, num_tokens),
        )

    def first(self, num_seqs: int, num_tokens: int) -> "SequenceInputs":
        """Returns the inputs of fewer sequences and tokens, in the same memory."""
        return SequenceInputs(
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            draw_positions=self.draw_positions[:num_tokens],
            query_starts=self.query_starts[: num_seqs + 1],
            context_lens=self.context_lens[:num_seqs],
            num_unkept=self.num_unkept[:num_seqs],
            tables=self.tables[:, :num_seqs],
            slots=self.slots[:, :num_tokens],
        )
