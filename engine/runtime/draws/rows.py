"""`Rows`: the runner's state of the running sequences, in arrays with one row each."""

from collections.abc import Iterable, Sequence

import numpy as np

from engine.batch import NO_LOGPROBS, ChunkOutput, ScheduledChunk, TableUpdate
from engine.runtime.draws.sampler import draw_record
from kernels import DRAW_RECORD

__all__ = ["Rows", "drawing_rows", "drawn_tokens", "num_leading_equal"]


class Rows:
    """State of the rows that `engine.batch` describes.

    Args:
        num_layer_groups: number of layer groups.
        num_rows: maximum number of sequences that run at once.
        max_blocks: maximum number of blocks of one sequence in one layer group.

    Attributes:
        tables: `[num_layer_groups, num_rows, max_blocks]` int32 block ids; entries
            that no update has set for the row's sequence hold old ids.
        positions: `[num_rows]` int64; position of the next token to run.
        last_tokens: `[num_rows]` int64; the token drawn last.
        draws: `[num_rows]` of `DRAW_RECORD`; the draw parameters.
        has_rules: `[num_rows]` bool; whether the draw parameters have rules.
        wants_logprobs: `[num_rows]` bool; `ScheduledChunk.wants_logprobs`.
        num_logprobs: `[num_rows]` int64; `ScheduledChunk.num_logprobs`.
    """

    def __init__(self, num_layer_groups: int, num_rows: int, max_blocks: int) -> None:
        self.tables = np.zeros((num_layer_groups, num_rows, max_blocks), np.int32)
        self.positions = np.zeros(num_rows, np.int64)
        self.last_tokens = np.zeros(num_rows, np.int64)
        self.draws = np.zeros(num_rows, DRAW_RECORD)
        self.has_rules = np.zeros(num_rows, bool)
        self.wants_logprobs = np.zeros(num_rows, bool)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS)

    def update_tables(self, updates: Iterable[TableUpdate]) -> None:
        """Writes new block ids into the tables."""
        for update in updates:
            end = update.first_index + len(update.block_ids)
            self.tables[update.layer_group, update.row, update.first_index : end] = update.block_ids

    def advance(self, chunks: Iterable[ScheduledChunk], decode_rows: np.ndarray) -> None:
        """Advances rows past the tokens of a step, and stores its chunks' draw parameters.

        Called before the step runs, so that after a failed step the rows still agree
        with the scheduler's tables.
        """
        for chunk in chunks:
            self.positions[chunk.row] = chunk.end
            self.wants_logprobs[chunk.row] = chunk.wants_logprobs
            self.num_logprobs[chunk.row] = chunk.num_logprobs
            if chunk.draws_for_row:
                self.draws[chunk.row] = draw_record(chunk.draws[0])
                self.has_rules[chunk.row] = chunk.rules is not None
        self.positions[decode_rows] += 1

    def keep_drawn(self, row_ids: np.ndarray, tokens: np.ndarray) -> None:
        """Stores the tokens that a step drew; the next step may run them.

        That may be before the engine ends the request of an `INVALID_TOKEN` or a `NO_TOKEN`; such
        a row continues with token 0.

        Args:
            row_ids: as `drawing_rows` returns them.
            tokens: `[n]` int64; the tokens.
        """
        self.last_tokens[row_ids] = np.maximum(tokens, 0)


def drawing_rows(chunks: Iterable[ScheduledChunk], decode_rows: np.ndarray) -> np.ndarray:
    """Returns the rows that draw the token that they may run next, `[n]` int64: chunks first, in
    their order.

    Args:
        chunks: the step's.
        decode_rows: the rows that decode, `[n]` int64.
    """
    single = [chunk.row for chunk in chunks if chunk.draws_for_row]
    return np.concatenate((np.array(single, np.int64), decode_rows)) if single else decode_rows


def drawn_tokens(
    chunks: Sequence[ScheduledChunk],
    outputs: Sequence[ChunkOutput | None],
    decoded: Sequence[int],
) -> np.ndarray:
    """Returns the tokens that `drawing_rows` have drawn in a step, `[n]` int64, in their order.

    Args:
        chunks: the step's.
        outputs: one per chunk, as in `StepOutput`.
        decoded: the tokens of the rows that decode.
    """
    single = [
        output.token_ids[0]
        for output, chunk in zip(outputs, chunks, strict=True)
        if output is not None and chunk.draws_for_row
    ]
    return np.array([*single, *decoded], np.int64)


def num_leading_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """Returns how many of the first tokens are equal."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(some), len(others)))
