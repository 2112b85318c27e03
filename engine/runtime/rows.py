"""`Rows`: what the runner remembers of each running sequence, a row of arrays each."""

from collections.abc import Iterable, Sequence

import numpy as np

from engine.batch import ChunkOutput, ScheduledChunk, TableUpdate
from engine.runtime.sampler import DRAW_RECORD, draw_record

__all__ = ["Rows"]


class Rows:
    """State of the rows; `engine.batch` says what it means.

    Args:
        num_groups: layer groups.
        num_rows: the most sequences that run at once.
        max_blocks: the most blocks of one sequence in one group.

    Attributes:
        tables: `[num_groups, num_rows, max_blocks]` int32 block ids; anything
            that was there before where no update has been.
        positions: `[num_rows]` int64; of the next token to run.
        last_tokens: `[num_rows]` int64; the token drawn last.
        draws: `[num_rows]` of `DRAW_RECORD`.
        wants_logprobs: `[num_rows]` bool.
    """

    def __init__(self, num_groups: int, num_rows: int, max_blocks: int) -> None:
        self.tables = np.zeros((num_groups, num_rows, max_blocks), np.int32)
        self.positions = np.zeros(num_rows, np.int64)
        self.last_tokens = np.zeros(num_rows, np.int64)
        self.draws = np.zeros(num_rows, DRAW_RECORD)
        self.wants_logprobs = np.zeros(num_rows, bool)

    def update_tables(self, updates: Iterable[TableUpdate]) -> None:
        """Enters new block ids."""
        for update in updates:
            end = update.first_index + len(update.block_ids)
            self.tables[update.group, update.row, update.first_index : end] = update.block_ids

    def advance(self, chunks: Iterable[ScheduledChunk], decode_rows: np.ndarray) -> None:
        """Moves rows past the tokens of a step, and takes over how its chunks draw.

        Called before the step runs, so that a step that fails leaves every row
        of it where its own blocks are.
        """
        for chunk in chunks:
            self.positions[chunk.row] = chunk.start_position + chunk.num_tokens
            self.wants_logprobs[chunk.row] = chunk.wants_logprobs
            if len(chunk.draws) == 1:
                self.draws[chunk.row] = draw_record(chunk.draws[0])
        self.positions[decode_rows] += 1

    def keep_drawn(
        self,
        chunks: Sequence[ScheduledChunk],
        outputs: Sequence[ChunkOutput | None],
        decode_rows: np.ndarray,
        decoded: Sequence[int],
    ) -> None:
        """Remembers the tokens that a step drew, for the next."""
        for chunk, output in zip(chunks, outputs, strict=True):
            if output is not None and len(chunk.draws) == 1:
                self.last_tokens[chunk.row] = _runnable(output.token_ids[0])
        self.last_tokens[decode_rows] = np.maximum(decoded, 0)  # as `_runnable`


def _runnable(token_id: int) -> int:
    """The next step may be on its way before anybody has seen that a token is invalid."""
    return max(token_id, 0)
