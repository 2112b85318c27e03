"""Drives a runner without a scheduler: rows start at any context, and decode from there."""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, pairwise

from engine.batch import ScheduledBatch, ScheduledChunk, StepOutput, TableUpdate
from engine.draw_params import DrawParams
from engine.runner import PendingOutput, Runner

__all__ = ["DrivenRows"]

_GREEDY = DrawParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)


class DrivenRows:
    """Rows of a runner. Each has blocks of its own, scattered over the pool.

    The rows attend to whatever bytes the pool has, which takes as long as real KV.

    Args:
        runner: runs the model. Layer groups share a row's blocks, which takes as long as own ones.
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

    def submit(self) -> PendingOutput:
        """Launches a decode step of all rows."""
        return self._runner.submit(self._batch())

    def overlapped(self, num_steps: int) -> list[float]:
        """Returns the seconds of each step. The next step is launched before one is read."""
        pending, times_s = self.submit(), []
        for _ in range(num_steps):
            following = self.submit()
            pending.result()
            times_s.append(time.perf_counter())
            pending = following
        pending.result()
        times_s.append(time.perf_counter())
        return [after - before for before, after in pairwise(times_s)]

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

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._runner.info.layout.block_size)
