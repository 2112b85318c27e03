"""`DrivenRows`: rows of a runner, driven without a scheduler."""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, pairwise

from baton.common.request.sampling_params import SamplingParams
from engine.batch import ScheduledBatch, ScheduledChunk, StepOutput, TableUpdate
from engine.draw_params import DrawParams
from engine.runner import PendingOutput, Runner

__all__ = ["DrivenRows"]

_GREEDY = DrawParams(SamplingParams(temperature=0.0), seed=0)


class DrivenRows:
    """Rows of a runner. Each has blocks of its own, scattered over the pool.

    The rows attend to whatever bytes the pool has, which takes as long as real KV.

    Args:
        runner: runs the model. Layer groups share a row's blocks, which takes as long as own ones.
            A model with states has a slot for each row.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._steps = count(1)
        self._rows: tuple[int, ...] = ()

    def blocks_short(self, num_rows: int, num_tokens: int) -> int:
        """Returns how many blocks the pool lacks for rows of `num_tokens` tokens each."""
        return max(0, num_rows * self._blocks_of(num_tokens) - self._runner.num_blocks)

    def begin(self, num_rows: int, context: int, num_tokens: int) -> None:
        """Starts rows with `context` tokens each, and blocks for `num_tokens`."""
        self._rows = ()
        chunks = [
            ScheduledChunk(row, (row + 1,), context - 1, (_GREEDY,)) for row in range(num_rows)
        ]
        self._runner.execute(self._batch(chunks, self._tables(num_rows, num_tokens)))
        self._rows = tuple(range(num_rows))

    def compute_prompts(self, num_prompts: int, length: int) -> StepOutput:
        """Computes prompts in one step, and draws a token for each."""
        self._rows = ()
        chunks = [
            ScheduledChunk(row, tuple(range(1, length + 1)), 0, (_GREEDY,))
            for row in range(num_prompts)
        ]
        return self._runner.execute(self._batch(chunks, self._tables(num_prompts, length)))

    def start_chunk(self) -> int:
        """Takes the last row out of those that decode, for the chunks of mixed steps; returns how
        many still decode.
        """
        self._rows = self._rows[:-1]
        return len(self._rows)

    def run_known(self, num_rows: int, context: int, num_tokens: int) -> StepOutput:
        """Runs known tokens of rows that were started, after their first `context` tokens.

        All but the first token of a row are draft tokens that the step checks.
        """
        self._rows = ()
        chunks = [
            ScheduledChunk(
                row, (row + 1,) * num_tokens, context, (_GREEDY,), num_drafts=num_tokens - 1
            )
            for row in range(num_rows)
        ]
        return self._runner.execute(self._batch(chunks))

    def run(self, num_chunk_tokens: int = 0) -> StepOutput:
        """Runs a decode step of all rows, in this thread; the argument is that of `submit`."""
        return self._runner.execute(self._decode_batch(num_chunk_tokens))

    def submit(self, num_chunk_tokens: int = 0) -> PendingOutput:
        """Launches a decode step of all rows.

        Args:
            num_chunk_tokens: of a prompt of the row behind them, which the step also computes.
        """
        return self._runner.submit(self._decode_batch(num_chunk_tokens))

    def overlapped(self, num_steps: int, num_chunk_tokens: int = 0) -> list[float]:
        """Returns the seconds of each step. The next step is launched before one is read.

        Args:
            num_steps: number of steps.
            num_chunk_tokens: as in `submit`.
        """
        pending, times_s = self.submit(num_chunk_tokens), []
        for _ in range(num_steps):
            following = self.submit(num_chunk_tokens)
            pending.result()
            times_s.append(time.perf_counter())
            pending = following
        pending.result()
        times_s.append(time.perf_counter())
        return [after - before for before, after in pairwise(times_s)]

    def _decode_batch(self, num_chunk_tokens: int) -> ScheduledBatch:
        if not num_chunk_tokens:
            return self._batch()
        tokens = tuple(range(1, num_chunk_tokens + 1))
        return self._batch([ScheduledChunk(len(self._rows), tokens, 0, (_GREEDY,))])

    def _batch(
        self, chunks: Sequence[ScheduledChunk] = (), tables: Iterable[TableUpdate] = ()
    ) -> ScheduledBatch:
        return ScheduledBatch(next(self._steps), tuple(chunks), self._rows, tuple(tables))

    def _tables(self, num_rows: int, num_tokens: int) -> Iterator[TableUpdate]:
        each = self._blocks_of(num_tokens)
        ids = random.Random(0).sample(range(self._runner.num_blocks), num_rows * each)
        for row in range(num_rows):
            block_ids = tuple(ids[row * each : (row + 1) * each])
            for layer_group in range(len(self._runner.info.windows)):
                yield TableUpdate(row, layer_group, 0, block_ids)
            if self._runner.info.states is not None:
                yield TableUpdate(row, len(self._runner.info.windows), 0, (row,) * each)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._runner.info.layout.block_size)
